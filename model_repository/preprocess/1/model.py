from tandem.triton_backend.preprocess_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
