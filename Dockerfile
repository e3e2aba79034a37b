# An image with PyTorch and Penstock, for `penstock launch kubernetes --image` and `penstock launch slurm --container`.
#
#     docker build --tag registry/penstock:1 .                                        NVIDIA
#     docker build --build-arg BASE=rocm/pytorch:latest --tag registry/penstock:1 .   AMD
#
# Never built by its authors: no container engine there. Tests only compare it with the files of the repository.
#
# BASE is any image that has PyTorch 2.11 or newer for the GPUs, with its Triton and a C compiler, which Triton needs; that
# PyTorch stays as it is. EXTRAS are optional parts, such as [huggingface,wandb].
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}
ARG EXTRAS=

# Images whose Python belongs to the system refuse pip otherwise.
ENV PIP_BREAK_SYSTEM_PACKAGES=1

WORKDIR /opt/penstock
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
RUN python -c 'import torch; print(f"torch=={torch.__version__}")' > /tmp/torch.txt \
    && python -m pip install --no-cache-dir --constraint /tmp/torch.txt ".${EXTRAS}" \
    && python -c 'import torch; assert open("/tmp/torch.txt").read().strip() == f"torch=={torch.__version__}"' \
    && rm -rf /opt/penstock/* /tmp/torch.txt

# Where the manifest mounts the volume that holds runs and text.
WORKDIR /workspace
RUN penstock --version
CMD ["penstock", "--help"]
