#!/bin/bash
# Puts a CRIU that works on current kernels at bin/criu.
#
# The system's own is used when it is new enough. Debian 12's is not, so a newer
# one is fetched from a later suite of the mirror that the machine already uses,
# together with its libraries and its libc. They are unpacked beside it and
# never installed: the system's libc and package lists stay as they are.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"

want=4.1
# From kernel 6.16 on, an older one cannot dump any TCP socket: it asks for
# options that only unix sockets have any more.
if at_least "$(uname -r)" 6.16; then want=4.2; fi
suites=(trixie sid)
debian_keys=/usr/share/keyrings/debian-archive-keyring.gpg

# sources: a line "URI KEYRING" for each of the machine's apt sources of its own
# release, in both of apt's formats. KEYRING may be empty.
sources() {
	local codename new old
	codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")
	shopt -s nullglob
	new=(/etc/apt/sources.list.d/*.sources)
	old=(/etc/apt/sources.list.d/*.list)
	shopt -u nullglob
	[[ ! -f /etc/apt/sources.list ]] || old+=(/etc/apt/sources.list)
	((${#new[@]} == 0)) || awk -v suite="^($codename|stable|testing|unstable|sid)$" '
		function flush(  i, n, s) {
			n = split(suites, s, " ")
			for (i = 1; i <= n; i++)
				if (s[i] ~ suite && types ~ /(^| )deb( |$)/ && off != "no" && uri) { print uri, key; break }
			types = suites = uri = key = off = ""
		}
		FNR == 1 || /^[ \t]*$/ { flush() }
		/^#/ { next }
		{ name = tolower($1); rest = $0; sub(/^[^:]*:[ \t]*/, "", rest) }
		name == "types:" { types = rest }
		name == "enabled:" { off = tolower(rest) }
		name == "uris:" { uri = $2 }
		name == "suites:" { suites = rest }
		name == "signed-by:" && $2 ~ /^\// { key = $2 }
		END { flush() }' "${new[@]}"
	((${#old[@]} == 0)) || awk -v suite="^($codename|stable|testing|unstable|sid)$" '
		$1 != "deb" { next }
		{
			key = ""
			sub(/^[ \t]*deb[ \t]+/, "")
			if (match($0, /^\[[^]]*\][ \t]*/)) {
				options = substr($0, 1, RLENGTH); $0 = substr($0, RLENGTH + 1)
				if (match(options, /signed-by=\/[^] \t]+/)) key = substr(options, RSTART + 10, RLENGTH - 10)
			}
			if ($2 ~ suite) print $1, key
		}' "${old[@]}"
}

# private_apt SUITE: writes the configuration of an apt that shares nothing with
# the system's. Its list of installed packages is empty, so that everything that
# criu needs counts as missing.
private_apt() {
	local uri keys
	read -r uri keys < <(sources) || die "criu: no Debian mirror in the apt sources; please install criu $want or newer"
	# The key of a later suite may be in the current keyring only.
	[[ ! -f $debian_keys || $keys == "$debian_keys" ]] || keys=${keys:+$keys,}$debian_keys
	rm -rf "$tmp/apt"
	mkdir -p "$tmp"/apt/{lists/partial,cache/archives/partial}
	: >"$tmp/apt/status"
	echo "deb [arch=$arch${keys:+ signed-by=$keys}] $uri $1 main" >"$tmp/apt/sources"
	cat >"$tmp/apt/conf" <<-CONF
		#clear APT::Update::Post-Invoke;
		#clear APT::Update::Post-Invoke-Success;
		Dir::Etc::sourcelist "$tmp/apt/sources";
		Dir::Etc::sourceparts "/dev/null";
		Dir::Etc::preferences "/dev/null";
		Dir::Etc::preferencesparts "/dev/null";
		Dir::State::lists "$tmp/apt/lists";
		Dir::State::status "$tmp/apt/status";
		Dir::State::extended_states "$tmp/apt/extended";
		Dir::Cache "$tmp/apt/cache";
		APT::Sandbox::User "root";
		Acquire::Languages "none";
	CONF
	export APT_CONFIG=$tmp/apt/conf
}

# fetch SUITE: downloads criu and the libraries that it depends on to $tmp/debs.
fetch() {
	local names
	echo "criu: fetching it and its libraries from suite $1 of this machine's mirror"
	private_apt "$1"
	apt-get -qq update || return
	mapfile -t names < <(apt-get -qq install --no-install-recommends --print-uris criu |
		sed -nE "s/^'[^']*' ([^_]+)_.*/\1/p" | grep -E '^(criu$|lib)' | grep -v python)
	((${#names[@]})) || return
	rm -rf "$tmp/debs"
	mkdir "$tmp/debs"
	(cd "$tmp/debs" && apt-get -qq download "${names[@]}")
}

# keep: unpacks $tmp/debs and keeps in the cache what the program maps.
keep() {
	local deb root=$tmp/root out=$tmp/out ld dirs so path v
	rm -rf "$root" "$out"
	for deb in "$tmp"/debs/*.deb; do dpkg -x "$deb" "$root" || return; done
	mkdir -p "$out/lib"
	ld=$(find "$root" -name "$loader" -print -quit)
	dirs=$(find "$root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
	cp -L "$ld" "$out/lib" && cp "$root/usr/sbin/criu" "$out" || return
	while read -r so path; do
		cp -L "$path" "$out/lib/$so" || return
	done < <("$ld" --library-path "$dirs" --list "$out/criu" | awk '$2 == "=>" && $1 !~ /\// { print $1, $3 }')
	v=$("$ld" --library-path "$out/lib" "$out/criu" --version | sed -n 's/^Version: *//p')
	at_least "$v" "$want" || return
	rm -rf "$cache/criu-$v-$arch"
	mv "$out" "$cache/criu-$v-$arch"
}

# newer_keys: updates the package with Debian's keys, and whether that changed it.
newer_keys() {
	local old
	((EUID == 0)) || return
	echo "criu: updating the package debian-archive-keyring"
	unset APT_CONFIG
	old=$(dpkg-query -W debian-archive-keyring 2>/dev/null || true)
	apt-get -qq update && apt-get -qq install debian-archive-keyring >/dev/null || return
	[[ $old != "$(dpkg-query -W debian-archive-keyring)" ]]
}

any_suite() {
	local suite
	for suite in "${suites[@]}"; do
		if fetch "$suite" && keep; then return; fi
		echo "criu: suite $suite gave no usable one"
	done
	return 1
}

# cached: the newest one in the cache, if it is new enough.
cached() {
	local newest v
	newest=$(find "$cache" -maxdepth 1 -name "criu-*-$arch" | sort -V | tail -n1)
	v=${newest##*/criu-}
	if at_least "${v%-"$arch"}" "$want"; then echo "$newest"; fi
}

# Running it also tells whether its libraries are where it looks for them: they
# are not when the repository was moved.
v=$(version "$bin/criu" || true)
if at_least "$v" "$want"; then
	echo "criu: $v already there"
	exit 0
fi
rm -rf "$bin/criu" "$bin/criu.d"

PATH=$PATH:/usr/sbin:/sbin
v=$(version criu || true)
if at_least "$v" "$want"; then
	echo "criu: using the system's $v"
	ln -s "$(type -P criu)" "$bin/criu"
	exit 0
fi

case $(uname -m) in
x86_64) loader='ld-linux-x86-64.so.2' ;;
aarch64) loader='ld-linux-aarch64.so.1' ;;
*) die "criu: don't know the loader of $(uname -m); please install criu $want or newer" ;;
esac
type -P dpkg patchelf >/dev/null || die "criu: not Debian; please install criu $want or newer"
arch=$(dpkg --print-architecture)

if [[ -z $(cached) ]]; then
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	any_suite || { newer_keys && any_suite; } || die "criu: none to be had; please install $want or newer"
fi

lib=$bin/criu.d/lib
cp -r "$(cached)" "$bin/criu.d"
patchelf --set-interpreter "$lib/$loader" --force-rpath --set-rpath "$lib" "$bin/criu.d/criu"
ln -s criu.d/criu "$bin/criu"
v=$(version "$bin/criu" || true)
at_least "$v" "$want" || die "criu: the fetched one does not run"
if ((EUID != 0)); then
	echo "criu: put $v into bin; only root can check it"
elif out=$("$bin/criu" check 2>&1); then
	echo "criu: put $v into bin; its check says: $(tail -n1 <<<"$out")"
else
	die "criu: $v fails its check on this kernel:"$'\n'"$out"
fi
