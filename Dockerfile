# An image with the trainer, the embedded engine and the plots: `docker build -t rollbook .`
# Default builds of torch include NVIDIA's libraries (`docker run --gpus all`). For a smaller image for CPUs, pass the index of torch's CPU
# builds: `docker build --build-arg TORCH_OPTIONS="--index-url URL" -t rollbook .`
#
#   docker run --rm -it -v "$PWD:/work" rollbook init my_agent
#   docker run --rm -it -v "$PWD:/work" --shm-size 2g rollbook train my_agent/run.toml
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY rollbook rollbook
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG TORCH_OPTIONS=""
ARG EXTRAS=train,plots
# hadolint ignore=SC2086
RUN python -m pip install --no-cache-dir ${TORCH_OPTIONS} "torch>=2.6"
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/rollbook-*.whl)[${EXTRAS}]" \
    && useradd --create-home --uid 1000 rollbook \
    && mkdir /work \
    && chown rollbook /work
USER rollbook
WORKDIR /work
ENTRYPOINT ["rollbook"]
CMD ["--help"]
