# NVIDIA image: docker run --gpus all -p 8000:8000 octavo:cuda
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" 'torch>=2.11'
COPY pyproject.toml LICENSE README.md ./
COPY csrc csrc
COPY engine engine
COPY server server
RUN pip install --no-cache-dir .
ENV OCTAVO_CACHE=/opt/models
RUN octavo pull smollm2

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home octavo
COPY --from=build /opt/octavo /opt/octavo
COPY --from=build --chown=10001 /opt/models /opt/models
ENV PATH=/opt/octavo/bin:$PATH OCTAVO_CACHE=/opt/models PYTHONUNBUFFERED=1
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]
ENTRYPOINT ["octavo", "serve"]
CMD ["smollm2", "--host", "0.0.0.0", "--no-auth"]
