#!/bin/sh
# Install the programs of Remoe for this user, from a release or from packages that were built here.
#
#     curl -fsSL https://github.com/remoe/remoe/releases/latest/download/install.sh | sh
#     REMOE_FROM=target/packages sh scripts/install.sh
#
#   REMOE_VERSION  version to install [default: the latest release]
#   REMOE_FROM     folder or URL with the archive and SHA256SUMS, in place of a release
#   PREFIX         where bin/ and share/remoe/ go [default: ~/.local]
#
# Exits with 1 and installs nothing if the machine does not fit, a file is missing or its checksum is another one.
set -eu

RELEASES=https://github.com/remoe/remoe/releases
# The oldest glibc that releases are built for.
GLIBC_MINOR=28

fail() {
    echo "install: $*" >&2
    exit 1
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "unsupported system $(uname -s): expected Linux"
    [ "$(uname -m)" = x86_64 ] || fail "unsupported processor architecture $(uname -m): expected x86_64"
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || fail "missing glibc: this C library is not supported"
    minor=${libc#glibc 2.}
    minor=${minor%%.*}
    case $minor in
        '' | *[!0-9]*) fail "cannot read the version of glibc: $libc" ;;
    esac
    [ "$minor" -ge "$GLIBC_MINOR" ] || fail "unsupported $libc: expected glibc 2.$GLIBC_MINOR or later"
    for tool in gzip sha256sum tar; do
        command -v "$tool" >/dev/null || fail "missing $tool: install it with the package manager"
    done
}

# Copies the file $1 of the source $from to $2.
get() {
    case $from in
        https://* | http://*)
            if command -v curl >/dev/null; then
                curl --fail --silent --show-error --location --output "$2" "$from/$1"
            elif command -v wget >/dev/null; then
                wget --quiet --output-document="$2" "$from/$1"
            else
                fail "missing curl or wget: install one with the package manager"
            fi
            ;;
        *) cp -- "$from/$1" "$2" ;;
    esac || fail "cannot get $1 from $from"
}

main() {
    check_machine
    prefix=${PREFIX:-${HOME:?install: HOME is not set: set PREFIX}/.local}
    if [ -n "${REMOE_FROM:-}" ]; then
        from=${REMOE_FROM%/}
    elif [ -n "${REMOE_VERSION:-}" ]; then
        from=$RELEASES/download/v$REMOE_VERSION
    else
        from=$RELEASES/latest/download
    fi
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 1' HUP INT TERM

    get SHA256SUMS "$scratch/SHA256SUMS"
    # The line of the archive: of this version, or of the only one there is.
    wanted="remoe-${REMOE_VERSION:-[0-9][0-9A-Za-z.-]*}-x86_64-linux\\.tar\\.gz"
    grep -E "^[0-9a-f]{64}  $wanted\$" "$scratch/SHA256SUMS" >"$scratch/line" ||
        fail "cannot find an archive ${REMOE_VERSION:+of version $REMOE_VERSION }for x86_64 in $from/SHA256SUMS"
    [ "$(wc -l <"$scratch/line")" -eq 1 ] || fail "several versions in $from: choose one with REMOE_VERSION"
    archive=$(cut -c 67- "$scratch/line")
    get "$archive" "$scratch/$archive"
    (cd "$scratch" && sha256sum --check --status line) ||
        fail "checksum mismatch: $archive of $from is damaged or not the one that SHA256SUMS names; nothing was installed"

    tar -xzf "$scratch/$archive" -C "$scratch"
    root=$scratch/${archive%.tar.gz}
    version=$("$root/bin/remoe" --version) || fail "cannot start the program $archive holds; nothing was installed"
    mkdir -p "$prefix/bin" "$prefix/share/remoe/demo"
    cp "$root"/share/remoe/demo/* "$prefix/share/remoe/demo/"
    for program in "$root"/bin/*; do
        # A rename replaces programs that run.
        cp "$program" "$prefix/bin/.${program##*/}.new"
        mv -f "$prefix/bin/.${program##*/}.new" "$prefix/bin/${program##*/}"
    done
    echo "installed $version in $prefix/bin"
    case :${PATH:-}: in
        *":$prefix/bin:"*) echo "first answer: remoe run demo \"Read Genesis 1:1.\"" ;;
        *)
            echo "add it to PATH:  export PATH=\"$prefix/bin:\$PATH\""
            echo "first answer:    $prefix/bin/remoe run demo \"Read Genesis 1:1.\""
            ;;
    esac
}

# At the end, so that a script that arrived in part does nothing.
main
