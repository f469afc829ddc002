"""What both sides agree on: words, wire, sampling rules. Pure: no grpc, torch, onnxruntime or asyncio."""
