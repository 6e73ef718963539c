//! The contents of a user's initramfs, as far as they can be read: names and links, as the kernel would unpack them.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};

use cpio::newc;

/// The most bytes that are unpacked. The contents of a larger archive count as unknown.
const MAX_UNPACKED: u64 = 1 << 30;
/// Bytes of names that are kept at most.
const MAX_NAMES: usize = 64 << 20;
/// As the kernel's PATH_MAX.
const MAX_PATH: u64 = 4096;
/// Memory of a decompressor for its window: what the kernel's own presets take, and more. KiB.
const MAX_WINDOW: u32 = 256 << 10;
/// Links that one path may lead along.
const MAX_LINKS: usize = 40;

const HEADER: usize = 110;
/// Where a header has the length of the name that follows it: 8 digits.
const NAME_LENGTH: std::ops::Range<usize> = 94..102;

const TYPE: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const LINK: u32 = 0o120_000;

/// How what the kernel takes begins: archives, of which it refuses an old form in its log, and its
/// compressions, by as many bytes as it looks at.
const BEGINNINGS: [&[u8]; 9] = [
    b"0707",
    &[0x1f, 0x8b],
    &[0x1f, 0x9e],
    b"BZ",
    &[0x5d, 0],
    &[0xfd, b'7'],
    &[0x89, b'L'],
    &[0x02, 0x21],
    &[0x28, 0xb5],
];

/// File systems that the kernel takes from an initial RAM disk in place of an archive, and where they say so: ext2
/// and later, minix (of two lengths of names), cramfs, romfs and squashfs.
const FILE_SYSTEMS: [(usize, &[u8]); 7] = [
    (0x438, &[0x53, 0xef]),
    (0x410, &[0x7f, 0x13]),
    (0x410, &[0x8f, 0x13]),
    (0, &[0x45, 0x3d, 0xcd, 0x28]),
    (0x200, &[0x45, 0x3d, 0xcd, 0x28]),
    (0, b"-rom1fs-"),
    (0, b"hsqs"),
];

/// Whether that may be an initial RAM disk, by how it begins: one whose contents nobody here knows, too.
#[must_use]
pub fn is_initrd(content: &[u8]) -> bool {
    let has = |(at, magic): (usize, &[u8])| {
        content.get(at..).is_some_and(|content| content.starts_with(magic))
    };
    // As the kernel skips them.
    let zeros = content.iter().take_while(|byte| **byte == 0).count();
    let begins = |magic| has((zeros, magic));
    content.is_empty() || BEGINNINGS.into_iter().any(begins) || FILE_SYSTEMS.into_iter().any(has)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Directory,
    Link(String),
    Other,
}

/// The names in one or several archives behind each other.
#[derive(Debug, Clone)]
pub struct Contents {
    /// By paths without links on the way to them.
    entries: BTreeMap<String, Entry>,
    bytes: usize,
}

impl Contents {
    /// Looks into archives: plain, or compressed by gzip, xz or zstd. `None`: they are damaged, too large, or
    /// compressed in another way.
    #[must_use]
    pub fn of(initramfs: &[u8]) -> Option<Self> {
        Self::unpacked(initramfs, MAX_UNPACKED)
    }

    fn unpacked(initramfs: &[u8], mut left: u64) -> Option<Self> {
        // The kernel has these before it unpacks anything.
        let entries = ["dev", "root"].map(|name| (name.to_owned(), Entry::Directory));
        let mut contents = Self { entries: entries.into(), bytes: 0 };
        let mut rest = initramfs;
        while let Some(at) = rest.iter().position(|byte| *byte != 0) {
            rest = rest.get(at..)?;
            rest = match rest {
                [b'0', ..] => {
                    contents.archives(&mut rest, &mut left).ok()?;
                    rest
                }
                [0x1f, 0x8b, ..] => {
                    let mut reader = flate2::bufread::GzDecoder::new(rest);
                    contents.packed(&mut reader, &mut left).ok()?;
                    reader.into_inner()
                }
                [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
                    let mut reader = lzma_rust2::XzReader::new_mem_limit(rest, false, MAX_WINDOW);
                    contents.packed(&mut reader, &mut left).ok()?;
                    reader.into_inner()
                }
                [0x28, 0xb5, 0x2f, 0xfd, ..] => {
                    let reader = zstd::stream::read::Decoder::with_buffer(rest).ok()?;
                    let mut reader = reader.single_frame();
                    contents.packed(&mut reader, &mut left).ok()?;
                    reader.finish()
                }
                _ => return None,
            };
        }
        Some(contents)
    }

    /// Whether there is a file, or what is like one, at this path, by whatever links.
    #[must_use]
    pub fn has_file(&self, path: &str) -> bool {
        matches!(self.at(path), Some((_, Entry::Other)))
    }

    /// Whether anything has this path.
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_start_matches('/'))
    }

    /// What is compressed has archives to its end.
    fn packed(&mut self, from: &mut impl Read, left: &mut u64) -> io::Result<()> {
        let mut from = BufReader::new(from);
        self.archives(&mut from, left)?;
        if from.fill_buf()?.is_empty() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// All archives up to what is none, with zeros between them.
    fn archives(&mut self, from: &mut impl BufRead, left: &mut u64) -> io::Result<()> {
        loop {
            let bytes = from.fill_buf()?;
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            if zeros > 0 {
                spend(left, zeros as u64)?;
                from.consume(zeros);
            } else if bytes.first() == Some(&b'0') {
                self.entry(from, left)?;
            } else {
                return Ok(());
            }
        }
    }

    fn entry(&mut self, from: &mut impl BufRead, left: &mut u64) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let mut header = [0; HEADER];
        from.read_exact(&mut header)?;
        // Before anything of that length is read.
        let length = header.get(NAME_LENGTH).and_then(|digits| std::str::from_utf8(digits).ok());
        let length = length.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let length = length.filter(|length| *length <= MAX_PATH).ok_or_else(invalid)?;
        let mut entry = newc::Reader::new(header.chain(from))?;
        let size = u64::from(entry.entry().file_size());
        spend(left, HEADER as u64 + length + size)?;
        let (name, mode) = (entry.entry().name().to_owned(), entry.entry().mode());
        let kind = match mode & TYPE {
            DIRECTORY => Entry::Directory,
            LINK if size > MAX_PATH => return Err(invalid()),
            LINK => {
                let mut target = String::new();
                entry.read_to_string(&mut target)?;
                Entry::Link(target)
            }
            _ => Entry::Other,
        };
        let is_trailer = entry.entry().is_trailer();
        // It takes what is left of the content, and fails where that ends too early.
        let rest = u64::from(entry.entry().file_size());
        let copied = io::copy(&mut entry, &mut io::sink())?;
        if kind == Entry::Other && copied != rest {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        entry.finish()?;
        if !is_trailer {
            self.insert(&name, kind)?;
        }
        Ok(())
    }

    /// As the kernel does, which makes no folders that the archive has not.
    fn insert(&mut self, name: &str, kind: Entry) -> io::Result<()> {
        let name = name.trim_end_matches('/');
        let (parent, last) = name.rsplit_once('/').unwrap_or(("", name));
        let Some((parent, Entry::Directory)) = self.at(parent) else { return Ok(()) };
        let path = match last {
            "" | "." | ".." => return Ok(()),
            last if parent.is_empty() => last.to_owned(),
            last => format!("{parent}/{last}"),
        };
        self.bytes += path.len() + if let Entry::Link(target) = &kind { target.len() } else { 0 };
        if self.bytes > MAX_NAMES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.entries.insert(path, kind);
        Ok(())
    }

    /// Where a path leads, and what is there.
    fn at(&self, path: &str) -> Option<(String, &Entry)> {
        let mut ahead: Vec<&str> = path.rsplit('/').collect();
        let mut here: Vec<&str> = Vec::new();
        let (mut links, mut entry) = (0, &Entry::Directory);
        while let Some(part) = ahead.pop() {
            match part {
                "" | "." => continue,
                ".." => {
                    here.pop();
                    // What it led through is a directory, or there was nothing.
                    entry = &Entry::Directory;
                    continue;
                }
                part => here.push(part),
            }
            entry = self.entries.get(&here.join("/"))?;
            if let Entry::Link(target) = entry {
                links += 1;
                if links > MAX_LINKS {
                    return None;
                }
                here.pop();
                if target.starts_with('/') {
                    here.clear();
                }
                ahead.extend(target.rsplit('/'));
                entry = &Entry::Directory;
            }
        }
        Some((here.join("/"), entry))
    }
}

fn spend(left: &mut u64, bytes: u64) -> io::Result<()> {
    *left = left.checked_sub(bytes).ok_or(io::ErrorKind::FileTooLarge)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::archive::Archive;

    /// As Debian's: /bin is a link, and the shell another.
    fn with_shell() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.file("usr/bin/busybox", 0o755, 5, &b"\x7fELF0"[..]).unwrap();
        archive.link("bin", "usr/bin").unwrap();
        archive.link("usr/bin/sh", "/bin/busybox").unwrap();
        archive.link("loop", "loop").unwrap();
        archive.link("dangling", "../nowhere").unwrap();
        archive.finish().unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut xz =
            lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(bytes).unwrap();
        xz.finish().unwrap()
    }

    #[test]
    fn links_are_followed_as_the_kernel_follows_them() {
        let contents = Contents::of(&with_shell()).unwrap();
        for path in ["/bin/sh", "bin/busybox", "/usr/bin/../bin/./sh"] {
            assert!(contents.has_file(path), "{path}");
        }
        for path in ["/bin", "/loop", "/dangling", "/bin/sh/x", "/sh", "/nowhere/../bin/sh", ""] {
            assert!(!contents.has_file(path), "{path}");
        }
        assert!(contents.has("/dangling") && contents.has("bin") && !contents.has("/sh"));
    }

    // Distributions' have several archives, of which the first is not compressed.
    #[test]
    fn all_archives_are_read_however_they_are_compressed() {
        let mut data = Archive::new(Vec::new());
        data.file("data", 0o644, 3, &b"abc"[..]).unwrap();
        let mut data = data.finish().unwrap();
        data.resize(data.len().next_multiple_of(512), 0);
        let shell = with_shell();
        let zstd = zstd::encode_all(&shell[..], 1).unwrap();
        for packed in [shell.clone(), gzip(&shell), xz(&shell), zstd] {
            for whole in [[&data[..], &packed].concat(), [&packed[..], &[0; 4], &data].concat()] {
                let contents = Contents::of(&whole).unwrap();
                assert!(contents.has_file("/bin/sh") && contents.has_file("/data"));
            }
            let cut = packed.len() / 2;
            assert!(Contents::of(&packed[..cut]).is_none(), "half of one says nothing");
        }
        let both = gzip(&[&data[..], &shell].concat());
        assert!(Contents::of(&both).unwrap().has_file("/bin/sh"));
        // Another compression, and no archive.
        for other in [&b"\x02\x21\x4c\x18lz4"[..], b"BZh9", b"text", &gzip(b"text")] {
            assert!(Contents::of(other).is_none(), "{other:?}");
        }
        assert!(!Contents::of(b"").unwrap().has_file("/bin/sh"));
    }

    // The kernel makes no folders of itself: a file in one that is not there is not there.
    #[test]
    fn what_the_kernel_could_not_make_is_not_there() {
        let mut archive = Vec::new();
        for name in ["bin/sh", "sbin", "sbin/sh"] {
            let mode = if name == "sbin" { DIRECTORY } else { 0o100_755 };
            let entry = newc::Builder::new(name).mode(mode).write(&mut archive, 0);
            entry.finish().unwrap();
        }
        newc::trailer(&mut archive).unwrap();
        let contents = Contents::of(&archive).unwrap();
        assert!(!contents.has("bin/sh") && contents.has_file("/sbin/sh"));
    }

    // A few KiB may claim, or unpack to, any size.
    #[test]
    fn sizes_are_not_believed() {
        let bombs = gzip(&vec![0; 64 << 10]).repeat(16);
        assert!(Contents::unpacked(&bombs, 1 << 20).is_some());
        assert!(Contents::unpacked(&bombs, (1 << 20) - 1).is_none());
        let mut archive = with_shell();
        archive[NAME_LENGTH].copy_from_slice(b"ffffffff");
        assert!(Contents::of(&archive).is_none());
        let mut archive = with_shell();
        archive[54..62].copy_from_slice(b"ffffffff");
        assert!(Contents::of(&archive).is_none());
    }

    proptest! {
        // A file that was downloaded half, or made to harm.
        #[test]
        fn damage_is_no_panic(
            kind in 0..4,
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        ) {
            let mut bytes = match kind {
                0 => with_shell(),
                1 => gzip(&with_shell()),
                2 => xz(&with_shell()),
                _ => zstd::encode_all(&with_shell()[..], 1).unwrap(),
            };
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let known = Contents::of(&bytes);
            prop_assert!(known.is_none_or(|known| known.entries.len() < 20));
        }
    }
}
