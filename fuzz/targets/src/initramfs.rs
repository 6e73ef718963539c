//! A user's initramfs, whose contents vmtrace reads before it boots: concatenated archives, plain or compressed, with
//! arbitrary damage.

use crate::input::Input;
use crate::kernels::damage;
use std::io;
use vmtrace::initramfs::{Archive, Contents};

/// As distributions': /bin is a link.
fn archive() -> Vec<u8> {
    let mut archive = Archive::new(Vec::new());
    archive.file("usr/bin/busybox", 0o755, 0, io::empty()).expect("in memory");
    archive.link("bin", "usr/bin").expect("in memory");
    archive.link("usr/bin/sh", "../../bin/busybox").expect("in memory");
    archive.finish().expect("in memory")
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let mut content = archive();
    if choice & 1 == 0 {
        content = input.take(usize::MAX).to_vec();
    } else if choice & 2 == 0 {
        damage(&mut content, 0, input.take(usize::MAX));
    }
    if choice & 4 != 0 {
        content = zstd::bulk::compress(&content, 1).expect("in memory");
        damage(&mut content, 0, input.take(usize::MAX));
    }
    let whole = choice & 3 == 3;
    if let Some(contents) = Contents::of(&content) {
        let mut found = ["/bin/sh", "/bin/../bin/./sh"].map(|path| contents.has_file(path));
        assert!(!contents.has_file("/bin/sh/none"));
        if whole && choice & 4 == 0 {
            found.sort_unstable();
            assert!(found[0], "the archive is as it was made");
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let of = |choice: u8| [&[choice][..], &archive()].concat();
    vec![of(0), of(1), of(4), vec![3], vec![7], [&[0][..], b"\x1f\x8b\x08"].concat()]
}
