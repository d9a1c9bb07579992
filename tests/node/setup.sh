#!/bin/sh
# What the tests of pages and dashboards need besides Python: Chromium, and from npm the packages in
# package-lock.json. Uses what is on the PATH; installs Debian's packages where it may (as root).
set -eu
cd "$(dirname "$0")"

has() { command -v "$1" >/dev/null; }
browser() { has chromium || has chromium-browser || has google-chrome; }

missing=
browser || missing="chromium fonts-dejavu-core"
{ has node && has npm; } || missing="$missing nodejs npm"
if [ -n "$missing" ]; then
    if has apt-get && [ "$(id -u)" = 0 ]; then
        echo "Installing$(printf " %s" $missing)"
        # Lists that are there serve, and a fresh container has none.
        # shellcheck disable=SC2086 # several names
        apt-get install -qq -y --no-install-recommends $missing >/dev/null 2>&1 || {
            apt-get -qq update
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null
        }
    else
        echo "Install Chromium, Node.js and npm (Debian: chromium nodejs npm): the tests of the" \
            "exporter's page and of the dashboards need them." >&2
        exit 1
    fi
fi
if ! cmp -s package-lock.json node_modules/.installed; then
    npm ci --silent --no-audit --no-fund
    cp package-lock.json node_modules/.installed
fi
