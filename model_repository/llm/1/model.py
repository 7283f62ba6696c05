from tandem.triton_backend.llm_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
