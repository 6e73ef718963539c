//! The emulated host's initramfs: vmtrace as `/init`, modules, and the files that its jobs need from the start.

use std::ffi::CStr;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::memfd::{MFdFlags, memfd_create};
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};

use super::error::{Context, HostError};
use vmtrace_initramfs::{Archive, Error, LoadedModule};

/// Its presence says that process 1 is an emulated host's.
pub(super) const MARKER: &str = "/etc/vmtrace-host";
pub(super) const MODULES: &str = "/lib/vmtrace";

/// Where a file for the emulated host comes from.
#[derive(Debug)]
pub enum FileSource {
    /// A file here; it stays executable if it is.
    Path(PathBuf),
    /// Its content.
    Bytes(Vec<u8>),
    /// A program's content.
    Program(Vec<u8>),
}

impl FileSource {
    /// Content, length and mode.
    pub(super) fn open(&self) -> Result<(Box<dyn Read + Send + '_>, u64, u32), Error> {
        let bytes = |b: &'_ [u8]| u64::try_from(b.len()).unwrap_or(u64::MAX);
        Ok(match self {
            Self::Bytes(content) => (Box::new(content.as_slice()), bytes(content), 0o644),
            Self::Program(content) => (Box::new(content.as_slice()), bytes(content), 0o755),
            Self::Path(path) => {
                let open = |reason| Error::Open { path: path.clone(), reason };
                let file = File::open(path).map_err(open)?;
                let metadata = file.metadata().map_err(open)?;
                if !metadata.is_file() {
                    return Err(Error::NotAFile(path.clone()));
                }
                let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
                (Box::new(file), metadata.len(), mode)
            }
        })
    }
}

/// A file in memory: with its last user, however that ends, it is gone.
pub(super) fn unnamed_file(name: &CStr) -> Result<File, HostError> {
    memfd_create(name, MFdFlags::MFD_CLOEXEC).map(File::from).context("make a memory file")
}

/// Makes the initramfs in a file that has no name, so that nothing can be left behind.
pub(super) fn build(
    vmtrace: &Path,
    modules: &[LoadedModule],
    files: &[(String, FileSource)],
) -> Result<File, HostError> {
    let file = unnamed_file(c"vmtrace-initramfs")?;
    let mut archive = Archive::new(BufWriter::with_capacity(1 << 20, file));
    for dir in ["dev", "proc", "sys", "run", "tmp", "bin", "etc", "root"] {
        archive.directory(dir, 0o755)?;
    }
    archive.char_device("dev/console", 0o600, (5, 1))?;
    let (program, size) = loadable_part(vmtrace)?;
    archive.file("init", 0o755, size, program.as_slice())?;
    archive.link("bin/vmtrace", "/init")?;
    archive.file(MARKER, 0o644, 0, std::io::empty())?;
    for (n, module) in modules.iter().enumerate() {
        let content = unsigned(&module.content);
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        archive.file(&format!("{MODULES}/{n:03}-{}.ko", module.name), 0o644, size, content)?;
    }
    for (name, source) in files {
        let (content, size, mode) = source.open()?;
        archive.file(name, mode, size, content)?;
    }
    let out = archive.finish()?;
    let mut file =
        out.into_inner().map_err(|e| e.into_error()).context("write the host's initramfs")?;
    file.seek(SeekFrom::Start(0)).context("write the host's initramfs")?;
    Ok(file)
}

/// A module without its signature: checking it would take the emulated CPU longer than loading the module.
fn unsigned(module: &[u8]) -> &[u8] {
    const MAGIC: &[u8] = b"~Module signature appended~\n";
    // Eight bytes of kinds, then the length of the signature before them.
    let strip = || {
        let (rest, length) = module.strip_suffix(MAGIC)?.split_last_chunk::<4>()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        rest.get(..rest.len().checked_sub(length.checked_add(8)?)?)
    };
    strip().unwrap_or(module)
}

/// A program without what only debuggers read: a debug build is mostly that, and every byte of it would be
/// copied by an emulated CPU.
fn loadable_part(path: &Path) -> Result<(Vec<u8>, u64), HostError> {
    let input = |reason| HostError::Input { what: path.display().to_string(), reason };
    let file = File::open(path).map_err(input)?;
    let size = file.metadata().map_err(input)?.len();
    let mut head = vec![0; 4096];
    let read = file.read_at(&mut head, 0).map_err(input)?;
    head.truncate(read);
    let end = segments_end(&head).map_or(size, |end| end.min(size));
    let mut content = Vec::new();
    file.take(end).read_to_end(&mut content).map_err(input)?;
    if end < size {
        // No section headers any more: offset, entry size, count, name index.
        for range in [0x28..0x30, 0x3a..0x40] {
            if let Some(field) = content.get_mut(range) {
                field.fill(0);
            }
        }
    }
    let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
    Ok((content, size))
}

/// Where the last segment of a 64-bit ELF file ends.
fn segments_end(head: &[u8]) -> Option<u64> {
    let header = elf::FileHeader64::<object::Endianness>::parse(head).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, head).ok()?;
    segments.iter().filter_map(|s| s.p_offset(endian).checked_add(s.p_filesz(endian))).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loadable_part_still_runs() {
        let me = std::env::current_exe().unwrap();
        let (content, size) = loadable_part(&me).unwrap();
        assert!(
            size < std::fs::metadata(&me).unwrap().len(),
            "test binaries have debug information"
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = std::process::Command::new(&path).arg("--list").output().unwrap();
        assert!(out.status.success() && !out.stdout.is_empty());
    }

    #[test]
    fn signatures_are_cut_off() {
        let signed = |length: u32| {
            let mut module = b"module".to_vec();
            module.extend(b"signature........");
            module.extend(length.to_be_bytes());
            module.extend(b"~Module signature appended~\n");
            module
        };
        assert_eq!(unsigned(&signed(9)), b"module");
        assert_eq!(unsigned(b"module"), b"module");
        for nonsense in [1000, u32::MAX] {
            assert_eq!(unsigned(&signed(nonsense)), signed(nonsense));
        }
    }

    #[test]
    fn other_programs_are_copied_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("script");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        assert_eq!(loadable_part(&path).unwrap(), (b"#!/bin/sh\n".to_vec(), 10));
    }
}
