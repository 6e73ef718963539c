//! Shared directories, with `vmtrace boot` run as a user would.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use vmtrace::emulated::cache_dir;

use crate::disks::noise;
use crate::live::vmtrace;
use crate::trace::syscall;

const MIB: usize = 1 << 20;

/// Contents pass in both directions, what may only be read stays, and the guest's own calls for it are traced.
pub fn a_guest_reads_and_writes_directories(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["in", "in/deep", "out"] {
        fs::create_dir(at(name)).unwrap();
    }
    let (content, secret) = (noise(4 * MIB + 77, 1), "a secret of the host");
    fs::write(at("in/deep/noise"), &content).unwrap();
    fs::write(at("secret"), secret).unwrap();
    symlink(at("secret"), at("in/absolute")).unwrap();
    symlink("../secret", at("in/relative")).unwrap();
    let before = listing(&at("in"));
    let run = "cp /mnt/share0/deep/noise /mnt/w/copy && cmp /mnt/share0/deep/noise /mnt/w/copy \
               && mkdir /mnt/w/many && for i in $(seq 100); do echo $i >/mnt/w/many/$i; done \
               && mv /mnt/w/many/100 /mnt/w/moved && rm /mnt/w/many/99 && ln -s moved /mnt/w/link \
               && dd if=/mnt/w/copy of=/mnt/w/copy bs=64k seek=3 count=1 conv=notrunc,fsync \
               && ! touch /mnt/share0/new && ! rm -f /mnt/share0/deep/noise \
               && ! cat /mnt/share0/absolute && ! cat /mnt/share0/relative \
               && ! cat /mnt/share0/../../secret && test $(ls /mnt/w/many | wc -l) = 98 && echo d-one";
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let fsync = syscall(kernel, "fsync").unwrap();
    let (read, write) = (at("in"), at("out"));
    let (read, write) = (read.display(), write.display());
    let (read, write) = (format!("--share={read}"), format!("--share={write},rw,tag=w"));
    let args = ["-f", &fsync, "--timeout", "300", "--cmdline", "loglevel=5", "--run", run];
    let output = vmtrace("boot", &image, &[&args[..], &[&read, &write]].concat());
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("d-one") && !err.contains(secret), "{err}");
    assert!(out.contains("dd-"), "its fsync is traced: {out}");
    let mut expected = content.clone();
    expected.copy_within(..64 << 10, 192 << 10);
    assert!(fs::read(at("out/copy")).unwrap() == expected, "another content");
    assert_eq!(fs::read_to_string(at("out/moved")).unwrap(), "100\n");
    assert_eq!(fs::read_to_string(at("out/link")).unwrap(), "100\n");
    let many: Vec<_> = (1..=98).map(|number| fs::read(at(&format!("out/many/{number}")))).collect();
    assert!(many.iter().all(Result::is_ok), "{:?}", listing(&at("out/many")));
    assert_eq!(listing(&at("in")), before);
    assert!(fs::read(at("in/deep/noise")).unwrap() == content, "what may only be read was written");
}

/// A directory is the whole system of a guest, which changes nothing of it; with the agent as process 1, and with another.
pub fn a_directory_is_the_root(kernel: &str, arch: &str) {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["bin", "etc", "share"] {
        fs::create_dir(at(name)).unwrap();
    }
    let busybox = cache_dir().unwrap().join("userland").join(arch).join("busybox");
    fs::copy(busybox, at("bin/busybox")).unwrap();
    for name in ["sh", "cat", "ls", "rm", "mkdir", "mount", "grep", "poweroff", "test"] {
        symlink("busybox", at("bin").join(name)).unwrap();
    }
    fs::write(at("etc/name"), "theirs\n").unwrap();
    let own = "#!/bin/sh\necho process $$ is i-nit of $(cat /etc/name)\nmount | grep ' / '\npoweroff -f\n";
    fs::write(at("bin/init"), own).unwrap();
    fs::set_permissions(at("bin/init"), fs::Permissions::from_mode(0o755)).unwrap();
    let before = (listing(directory.path()), listing(&at("bin")));
    let run = "cat /etc/name && echo o-urs >/etc/name && cat /etc/name && rm /bin/ls && ! test -e /bin/ls \
               && mkdir /new && echo x >/new/x && cat /new/x && mark told && test -e /proc/self/exe \
               && test -e /sys/kernel && test -e /dev/null && cat /mnt/share0/deeper && exit 7";
    fs::write(at("share/deeper"), "s-hared").unwrap();
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let call = syscall(kernel, "mkdir*").unwrap();
    let (root, share) = (format!("--root={}", directory.path().display()), at("share"));
    let share = format!("--share={}", share.display());
    let args = ["-f", &call, "--timeout", "300", "--cmdline", "loglevel=5"];
    let boot = |more: &[&str]| {
        let output = vmtrace("boot", &image, &[&args[..], &[&root], more].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, err) = boot(&[&share, "--run", run]);
    assert_eq!(code, Some(4), "--run has failed, with 7: {err}");
    assert!(err.contains("run status 7"), "{err}");
    assert!(["theirs", "o-urs", "s-hared"].iter().all(|said| err.contains(said)), "{err}");
    assert!(out.contains("mkdir-") && out.contains("told"), "{out}");
    let (code, _, err) = boot(&["--init", "/bin/init"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("process 1 is i-nit of theirs"), "{err}");
    assert!(err.contains("on / type overlay"), "{err}");
    assert_eq!((listing(directory.path()), listing(&at("bin"))), before);
    assert_eq!(fs::read_to_string(at("etc/name")).unwrap(), "theirs\n");
}

fn listing(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().flatten();
    let mut names: Vec<_> =
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
