# docker build -t hunch .                                              a CPU
# docker build -t hunch --build-arg TORCH_INDEX= .                     an NVIDIA GPU (run with --gpus all)
FROM python:3.12-slim
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The base image decides the compiler's version; pyproject.toml says which packages will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /hunch
COPY pyproject.toml README.md LICENSE ./
COPY src src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url $TORCH_INDEX} "$TORCH" \
    && pip install --no-cache-dir '.[serve]'
ENV HUNCH_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["hunch"]
CMD ["serve", "--host", "0.0.0.0"]
