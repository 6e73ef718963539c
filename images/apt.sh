# shellcheck shell=bash
# A private apt: its own sources, lists and caches, so that neither /etc/apt nor the system's package state
# is read for packages or changed. Sourced by images/fetch and scripts/setup; the caller defines `die`.

# vmtrace_cache: the directory everything downloaded lives in.
vmtrace_cache() {
    if [[ -n ${VMTRACE_CACHE:-} ]]; then
        printf '%s\n' "$VMTRACE_CACHE"
    elif [[ -n ${XDG_CACHE_HOME:-} ]]; then
        printf '%s/vmtrace\n' "$XDG_CACHE_HOME"
    elif [[ -n ${HOME:-} ]]; then
        printf '%s/.cache/vmtrace\n' "$HOME"
    else
        die "no cache directory: HOME is not set" "set VMTRACE_CACHE to a directory"
    fi
}

# debian_keyring: the keys that archive signatures are checked against.
debian_keyring() {
    local file
    for file in ${VMTRACE_DEBIAN_KEYRING:+"$VMTRACE_DEBIAN_KEYRING"} \
        /usr/share/keyrings/debian-archive-keyring.pgp /usr/share/keyrings/debian-archive-keyring.gpg; do
        [[ -r $file ]] && printf '%s\n' "$file" && return
        [[ $file == "${VMTRACE_DEBIAN_KEYRING:-}" ]] && break
    done
    die "no Debian archive keyring (${file})" "install the package debian-archive-keyring"
}

# debian_mirror SUITE: where SUITE is had: what the system's own apt uses, or Debian's public default.
debian_mirror() {
    local suite=$1 default override pattern uri
    case $suite in
    *-security)
        default=http://deb.debian.org/debian-security
        override=${VMTRACE_DEBIAN_SECURITY_MIRROR:-}
        pattern='^[a-z]+-security '
        ;;
    *)
        default=http://deb.debian.org/debian
        override=${VMTRACE_DEBIAN_MIRROR:-}
        pattern='^[a-z]+(-updates|-backports)? '
        ;;
    esac
    [[ -n $override ]] && printf '%s\n' "$override" && return
    if grep -qs '^ID=debian$' /etc/os-release; then
        # RELEASE is the suite as the sources name it, known without any downloaded list. Third-party archives
        # use Debian's suite names too; a mirror also has Debian's directory name.
        # shellcheck disable=SC2016 # the fields are apt's, not the shell's
        uri=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
            grep -E "$pattern" | grep -E '/debian(-security)?/?$' | grep -v ' cdrom:' |
            awk 'NR == 1 { print $2 }') || true
    fi
    printf '%s\n' "${uri:-$default}"
}

# apt_private DIR ARCH STATUS SUITE...: makes the private apt in DIR for packages of ARCH; STATUS is the dpkg
# status it resolves against. Use with `apt_in DIR apt-get ...`.
apt_private() {
    local dir=$1 arch=$2 status=$3 suite keyring
    shift 3
    keyring=$(debian_keyring)
    mkdir -p "$dir/lists/partial" "$dir/archives/partial" ||
        die "cannot create $dir" "check its owner and free space, or set VMTRACE_CACHE"
    : >"$dir/empty"
    # A mirror's address or a proxy may carry a password.
    (umask 077 && : >>"$dir/debian.sources" && : >>"$dir/apt.conf")
    for suite; do
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nArchitectures: %s\nTargets: Packages\nSigned-By: %s\n\n' \
            "$(debian_mirror "$suite")" "$suite" "$arch" "$keyring"
    done >"$dir/debian.sources"
    {
        # The system's proxies, certificates and other transport settings hold here too; its hooks do not.
        apt-config dump 2>/dev/null | grep -E '^(Acquire::|Dir::Etc::netrc)' | grep -v -E '^Acquire::[A-Za-z]+ "";$' || true
        cat <<CONF
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
#clear Acquire::Languages;
Acquire::Languages { "none"; };
Acquire::Retries "1";
APT::Architecture "$arch";
#clear APT::Architectures;
APT::Architectures { "$arch"; };
APT::Update::Error-Mode "any";
Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "$dir/debian.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "$dir";
Dir::State::lists "$dir/lists";
Dir::State::extended_states "$dir/extended_states";
Dir::State::status "$status";
Dir::Cache "$dir";
Dir::Cache::archives "$dir/archives";
Dir::Log "$dir";
CONF
        # Root of a user namespace cannot become the user who downloads otherwise.
        if [[ $(cat /proc/self/setgroups 2>/dev/null) == deny ]]; then
            printf 'APT::Sandbox::User "root";\n'
        fi
    } >"$dir/apt.conf"
}

apt_in() {
    local dir=$1
    shift
    APT_CONFIG=$dir/apt.conf LC_ALL=C "$@"
}

# apt_cause LOG: says on one line why apt failed, and on a second what helps.
apt_cause() {
    local log=$1
    if grep -qi 'no space left' "$log"; then
        printf 'the disk is full\nfree some space or set VMTRACE_CACHE to another disk\n'
    elif grep -qE 'NO_PUBKEY|EXPKEYSIG|Missing key' "$log"; then
        printf 'the archive is signed with a key that %s lacks\nupgrade the package debian-archive-keyring\n' "$(debian_keyring)"
    elif grep -qE 'BADSIG|REVKEYSIG|ERRSIG|NODATA|is (not|no longer) signed|not valid: (BAD|NOSPLIT)|Clearsigned file|Hash Sum mismatch|signature verification|Message has been manipulated' "$log"; then
        printf 'what the mirror sent does not match its signature\nuse another mirror: set VMTRACE_DEBIAN_MIRROR and VMTRACE_DEBIAN_SECURITY_MIRROR\n'
    elif grep -qE 'unexpected size|Mirror sync' "$log"; then
        printf 'what the mirror sent has not the signed size (it may be in the middle of an update)\ntry again in some minutes, or set VMTRACE_DEBIAN_MIRROR and VMTRACE_DEBIAN_SECURITY_MIRROR\n'
    elif grep -qE 'is not valid yet|is expired|Not live until' "$log"; then
        printf 'the archive index is out of date by this clock\ncheck the clock (date), or use another mirror: set VMTRACE_DEBIAN_MIRROR\n'
    elif grep -qE 'does not have a Release file|404 ' "$log"; then
        printf 'the mirror does not carry it\nuse another mirror: set VMTRACE_DEBIAN_MIRROR and VMTRACE_DEBIAN_SECURITY_MIRROR\n'
    elif grep -qiE 'resolv|could not connect|unable to connect|connection|timed out|failed to fetch' "$log"; then
        printf 'the Debian mirror cannot be reached\ncheck the network and the proxy settings of apt, or set VMTRACE_DEBIAN_MIRROR\n'
    else
        printf 'apt failed: %s\nsee %s\n' "$(grep -E '^(E|W):' "$log" | head -n 1 || true)" "$log"
    fi
}
