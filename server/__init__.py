"""The HTTP face of Octavo: OpenAI's routes over an `engine.client.EngineClient`."""
