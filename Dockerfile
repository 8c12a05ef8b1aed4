# CPU image with the default model in it: docker run -p 8000:8000 octavo
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
COPY constraints.txt pyproject.toml LICENSE README.md ./
# The CPU build of torch by its full name; the layer is kept until the constraints change.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu
COPY csrc csrc
COPY engine engine
COPY server server
RUN pip install --no-cache-dir -c constraints.txt .
# Only encoders and models without a native decoder need these, a gigabyte: --build-arg TORCH=keep
ARG TORCH=
RUN test -n "$TORCH" || pip uninstall -y torch transformers sympy mpmath networkx
ENV OCTAVO_CACHE=/opt/models
RUN octavo pull smollm2

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="octavo" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home octavo
COPY --from=build /opt/octavo /opt/octavo
COPY --from=build --chown=10001 /opt/models /opt/models
ENV PATH=/opt/octavo/bin:$PATH OCTAVO_CACHE=/opt/models PYTHONUNBUFFERED=1
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]
# Publishing the port is the decision to be reachable; give --api-key and drop --no-auth where others can reach it.
ENTRYPOINT ["octavo", "serve"]
CMD ["smollm2", "--host", "0.0.0.0", "--no-auth"]
