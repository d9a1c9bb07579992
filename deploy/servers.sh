#!/bin/sh
# Finds Prometheus, promtool, Alertmanager and amtool, and links them into DIR/bin; where they can
# be had, VictoriaMetrics (with vmagent and vmalert) and node_exporter too, which only tests of the
# rules, the dashboards and the agent need.
# In this order: the folder in ACT_SERVERS, the PATH, Debian's packages unpacked into DIR
# (no root, no daemon, nothing outside DIR). Usage: servers.sh DIR
set -eu

dir=${1:?usage: servers.sh DIR}
mkdir -p "$dir/bin"
dir=$(cd "$dir" && pwd)

# Debian calls some binaries otherwise than upstream's archives do.
names_of() {
    case $1 in
        vm* | victoria-metrics) echo "$1 $1-prod" ;;
        alertmanager) echo "prometheus-alertmanager alertmanager" ;;
        node_exporter) echo "prometheus-node-exporter node_exporter" ;;
        *) echo "$1" ;;
    esac
}

find_in() { # FOLDER NAME: the path of the program in that folder
    for name in $(names_of "$2"); do
        if [ -x "$1/$name" ]; then (cd "$1" && echo "$PWD/$name"); return 0; fi
    done
    return 1
}

find_on_path() {
    for name in $(names_of "$1"); do
        command -v "$name" && return 0
    done
    return 1
}

link_all() { # FINDER...: links every program that the finder knows; fails if one is missing
    for program in prometheus promtool alertmanager amtool; do
        found=$("$@" "$program") || return 1
        ln -sf "$found" "$dir/bin/$program"
    done
    for program in victoria-metrics vmagent vmalert node_exporter; do
        ! found=$("$@" $program) || ln -sf "$found" "$dir/bin/$program"
    done
}

from_debian() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial"
    cd "$dir/apt"
    # The machine's own package lists first; where there are none (a fresh container), lists of
    # our own, which needs no root.
    apt-get -qq download prometheus prometheus-alertmanager 2>/dev/null || {
        own="-o Dir::State::lists=$dir/apt/lists -o Dir::Cache=$dir/apt/cache"
        # shellcheck disable=SC2086 # two options and their values
        apt-get -qq $own update 2>/dev/null &&
            apt-get -qq $own download prometheus prometheus-alertmanager 2>/dev/null || return 1
    }
    for package in victoria-metrics prometheus-node-exporter; do
        # shellcheck disable=SC2086 # none, or two options and their values
        apt-get -qq ${own-} download $package 2>/dev/null || true
    done
    for package in ./*.deb; do dpkg -x "$package" "$dir/debian" || return 1; done
    rm -rf "$dir/apt"
    make_relocatable
}

# Debian's Alertmanager reads its default templates from a folder that is compiled in, and does
# not start without them. The copy below reads them from file descriptor 9 (a path of the same
# length; extra slashes mean nothing), which the wrapper opens on the unpacked folder.
make_relocatable() {
    bin=$dir/debian/usr/bin share=usr/share/prometheus/alertmanager
    [ -f "$dir/debian/$share/default.tmpl" ] || return 0
    LC_ALL=C sed "s|/$share|/proc/self/fd/9///////////////////|g" \
        "$bin/prometheus-alertmanager" >"$bin/alertmanager.relocated"
    chmod 755 "$bin/alertmanager.relocated"
    printf '#!/bin/sh\nexec 9<"%s"\nexec "%s" "$@"\n' "$dir/debian/$share" \
        "$bin/alertmanager.relocated" >"$bin/prometheus-alertmanager"
}

# Nothing to do where the same choice was made before, by this script as it stands now, and what it
# found is still there.
if [ "$dir/.ready" -nt "$0" ] && [ "$(cat "$dir/.ready")" = "${ACT_SERVERS:-}" ]; then
    complete=yes
    for program in prometheus promtool alertmanager amtool; do
        [ -x "$dir/bin/$program" ] || complete=no
    done
    [ $complete = no ] || exit 0
fi

if [ -n "${ACT_SERVERS:-}" ]; then
    link_all find_in "$ACT_SERVERS" || {
        echo "ACT_SERVERS=$ACT_SERVERS must hold prometheus, promtool, alertmanager and amtool" >&2
        exit 1
    }
elif link_all find_on_path; then
    :
elif (from_debian) && link_all find_in "$dir/debian/usr/bin"; then
    :
else
    echo "Install Prometheus and Alertmanager (Debian: prometheus prometheus-alertmanager), or set" \
        "ACT_SERVERS to a folder with prometheus, promtool, alertmanager and amtool." >&2
    exit 1
fi
"$dir/bin/prometheus" --version 2>&1 | head -n 1
"$dir/bin/alertmanager" --version 2>&1 | head -n 1
echo "${ACT_SERVERS:-}" >"$dir/.ready"
