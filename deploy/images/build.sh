#!/usr/bin/env bash
# Builds the images perseus-operator and perseus-agent with whichever of docker, podman and buildah works here.
#
# usage: deploy/images/build.sh [operator] [agent]        neither named: both
#   REGISTRY=...      put before the names, without a slash at its end
#   TAG=...           default: the chart's appVersion; never latest
#   BASE=...          base image, for a release name@sha256:...
#   PIP_OPTIONS=...   options of pip in the build, such as --no-index --find-links=/wheels
#   WHEELS=...        a folder that the build sees as /wheels
#   PUSH=yes          push what was built
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "build.sh: $*" >&2; exit 1; }

tag=${TAG:-$(sed -n 's/^appVersion: *"\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' charts/perseus/Chart.yaml)}
[ "$tag" != latest ] || fail "TAG=latest is refused, as by the chart: nobody could say what runs"

if docker info >/dev/null 2>&1; then builder=docker
elif command -v podman >/dev/null; then builder=podman
elif command -v buildah >/dev/null; then builder=buildah
else fail "no builder: docker has no engine here, and neither podman nor buildah is installed"
fi

options=(--build-arg "PIP_OPTIONS=${PIP_OPTIONS:-}")
[ -z "${BASE:-}" ] || options+=(--build-arg "BASE=$BASE")
if [ -n "${WHEELS:-}" ]; then
  [ "$builder" != docker ] || fail "WHEELS: docker mounts no folders into builds; use podman or buildah"
  options+=(--volume "$(realpath "$WHEELS"):/wheels:ro")
fi

[ $# -gt 0 ] || set -- operator agent
for name in "$@"; do
  [ -f "deploy/images/$name.Dockerfile" ] || fail "unknown image '$name': known are operator and agent"
  image="${REGISTRY:+$REGISTRY/}perseus-$name:$tag"
  echo "building $image with $builder"
  case $builder in
    # BuildKit attests what is in the image and how it came there; attestations live in registries.
    docker) docker build ${PUSH:+--push --provenance=true --sbom=true} "${options[@]}" \
              --file "deploy/images/$name.Dockerfile" --tag "$image" . ;;
    *)      "$builder" build --format docker "${options[@]}" --file "deploy/images/$name.Dockerfile" --tag "$image" .
            [ -z "${PUSH:-}" ] || "$builder" push "$image" ;;
  esac
done
