#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Open MPI where Debian's packages can be had and nobody has one, for the tests of launchers. They are skipped
# without it, so that what fails here is said and nothing more.
set -uo pipefail
if command -v mpirun >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: no mpirun, and no way to install one: launchers that need it are not tested"
    exit 0
fi
echo "setup: installing Open MPI"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends openmpi-bin; } >/dev/null 2>&1; then
    echo "setup: Open MPI could not be installed: launchers that need it are not tested"
fi
exit 0
