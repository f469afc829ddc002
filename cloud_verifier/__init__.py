"""The verifier: the only author of the committed ids. Never onnxruntime."""
