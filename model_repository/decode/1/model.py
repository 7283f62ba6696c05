from tandem.triton_backend.engine_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
