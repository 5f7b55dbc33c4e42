# hf_gpipe with its examples, for CPUs and for NVIDIA GPUs.
#
#     docker build -t hf_gpipe .
#     docker run --rm -v "$PWD/outputs:/hf_gpipe/outputs" hf_gpipe bash scripts/quickstart.sh
#     docker run --rm --gpus all hf_gpipe bash scripts/gpu_check.sh --quick
#
# torch comes with its CUDA libraries, so one image serves both. For a small image without them, say where pip finds
# torch's CPU build, as torch's install page does: --build-arg TORCH="torch==2.13.0 --index-url ADDRESS".
FROM python:3.11-slim

# Tests of the code for CUDA compile a part; Triton compiles kernels.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*

WORKDIR /hf_gpipe
COPY pyproject.toml constraints.txt README.md ./
ARG TORCH="torch"
RUN pip install --no-cache-dir -c constraints.txt ${TORCH}
COPY . .
RUN pip install --no-cache-dir -e ".[quantised]" -c constraints.txt

# The scripts take this interpreter, and make no environment of their own.
ENV HF_GPIPE_PYTHON=/usr/local/bin/python
CMD ["hf-gpipe", "--help"]
