# A production image: Tandem inside NVIDIA's Triton container.
#
# NOT BUILT where this file was written (no container registry was at hand). BASE_IMAGE is the
# "-py3" variant of NVIDIA's Triton Inference Server container of your choice (26.x; 24.10 is the
# release the tests run on), under the name by which your registry knows it:
#
#   docker build --build-arg BASE_IMAGE=<registry>/tritonserver:<release>-py3 -t tandem .
#   docker run --gpus all --shm-size=64m -p 8000-8002:8000-8002 -v /models/m:/model tandem \
#       --model /model --profile h100-a100

ARG BASE_IMAGE=tritonserver:py3
FROM ${BASE_IMAGE}

WORKDIR /opt/tandem
COPY pyproject.toml README.md ./
COPY python_backends python_backends
COPY client client
COPY scripts scripts
COPY perf perf
COPY model_repository model_repository

# torch with the CUDA libraries it was built for: the default build of the package index. Editable,
# so that the model repository beside the sources is the default one.
ARG TORCH="torch==2.13.0"
RUN python3 -m pip install --no-cache-dir --break-system-packages ${TORCH} \
    && python3 -m pip install --no-cache-dir --break-system-packages -e ".[cuda,rdma]"

ENV TANDEM_TRITON=/opt/tritonserver

EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --timeout=70s CMD ["tandem", "health"]
# tandem serve drains, then stops Triton and its engines; give `docker stop` the time: --time 75.
ENTRYPOINT ["tandem", "serve", "--host", "0.0.0.0"]
