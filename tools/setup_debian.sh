#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# setup_debian.sh PROGRAM PACKAGE...  installs Debian's packages where nobody has the program yet and they can be had.
# Tests that need it are skipped without it, so that what fails here is said and nothing more.
set -uo pipefail
program=$1
shift
if command -v "$program" >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: no $program, and no way to install it: what needs it is not tested"
    exit 0
fi
echo "setup: installing $*"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null 2>&1; then
    echo "setup: $* could not be installed: what needs $program is not tested"
fi
exit 0
