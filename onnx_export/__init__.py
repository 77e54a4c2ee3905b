"""Export of models to ONNX. Nothing yet: this folder only reserves the place and the import name."""

if __name__ != "mlx_sparse.onnx_export":  # an editable install puts the project root on sys.path
    raise ImportError("onnx_export/ is installed as mlx_sparse.onnx_export: run `pip install -e .`, then import that")
