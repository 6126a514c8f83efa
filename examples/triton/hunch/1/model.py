"""hunch in Triton's Python backend; install hunch-llm into the backend's Python."""

from hunch.integrations.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
