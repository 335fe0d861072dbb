# An image with the trainer, the embedded engine and the plots: `docker build -t rollbook .`
# Default builds of torch include NVIDIA's libraries (`docker run --gpus all`). For a smaller image for CPUs, pass the index of torch's CPU
# builds: `docker build --build-arg TORCH_OPTIONS="--index-url URL" -t rollbook .`
#
#   docker run --rm -it -v "$PWD:/data" rollbook init my_agent
#   docker run --rm -it -v "$PWD:/data" --shm-size 2g rollbook train my_agent/run.toml
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY rollbook rollbook
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# An environment server without torch. It starts all its simulated clouds before it listens. Clients send the token of /data/token:
#
#   docker build --target env -t rollbook-env . && docker run --rm -p 8000:8000 -v "$PWD:/data" rollbook-env --pool-size 8
FROM python:3.11-slim AS env
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/rollbook-*.whl)[aws]" \
    && useradd --create-home --uid 1000 rollbook \
    && mkdir /data \
    && chown rollbook /data
USER 1000
WORKDIR /data
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["rollbook", "env", "serve", "--env", "aws", "--host", "0.0.0.0", "--port", "8000", "--token-file", "/data/token"]

FROM python:3.11-slim
ARG TORCH_OPTIONS=""
ARG EXTRAS=train,plots
ARG TORCH_VERSION=2.13.0
# The options are words, not a package.
# hadolint ignore=DL3013,SC2086
RUN python -m pip install --no-cache-dir ${TORCH_OPTIONS} "torch==${TORCH_VERSION}"
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/rollbook-*.whl)[${EXTRAS}]" \
    && useradd --create-home --uid 1000 rollbook \
    && mkdir /data \
    && chown rollbook /data
USER 1000
WORKDIR /data
ENTRYPOINT ["rollbook"]
CMD ["--help"]
