//! Kernel modules: the files that a module needs, in load order, and their decompressed content.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use object::{Object, ObjectSection};

use crate::error::Error;

/// The limit of decompression. No module is nearly as large.
const SIZE_MAX: u64 = 256 << 20;

/// Most files that are looked at without a `modules.dep`. A kernel's own build tree has a third of that.
const MOST_ENTRIES: u32 = 1_000_000;

const SUFFIXES: [&str; 4] = [".ko", ".ko.xz", ".ko.gz", ".ko.zst"];

/// The modules of a directory, with what each depends on.
#[derive(Debug)]
pub struct Modules {
    dir: PathBuf,
    /// By name, as `modinfo` has it: underscores only.
    by_name: BTreeMap<String, Module>,
    /// Names of those that are part of the kernel itself.
    builtin: BTreeSet<String>,
}

#[derive(Debug)]
struct Module {
    file: PathBuf,
    needs: Vec<String>,
    /// Another one of that name, of the same kernel: nobody knows which one is meant.
    other: Option<PathBuf>,
}

/// A module ready to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedModule {
    /// Its name, underscores only.
    pub name: String,
    /// The ELF file, decompressed.
    pub content: Vec<u8>,
}

impl Modules {
    /// Reads a directory like the content of `/lib/modules/RELEASE`. Without a `modules.dep`, the modules below
    /// it are asked themselves.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let dep = dir.join("modules.dep");
        let mut modules =
            Self { dir: dir.to_owned(), by_name: BTreeMap::new(), builtin: BTreeSet::new() };
        match fs::read_to_string(&dep) {
            Ok(text) => modules.parse_dep(&text),
            Err(e) if e.kind() == io::ErrorKind::NotFound => modules.scan(MOST_ENTRIES)?,
            Err(reason) => return Err(Error::Open { path: dep, reason }),
        }
        if modules.by_name.is_empty() {
            return Err(Error::NoModules(dir.to_owned()));
        }
        if let Ok(text) = fs::read_to_string(dir.join("modules.builtin")) {
            modules.builtin = text.lines().filter_map(module_name).collect();
        }
        Ok(modules)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The named modules and all they need, dependencies first, each once. What is built into the kernel is
    /// left out.
    pub fn resolve(&self, names: &[&str]) -> Result<Vec<LoadedModule>, Error> {
        let mut order = Vec::new();
        for name in names {
            self.visit(&name.replace('-', "_"), &mut order)?;
        }
        order
            .into_iter()
            .map(|name| Ok(LoadedModule { content: self.read(name)?, name: name.to_owned() }))
            .collect()
    }

    /// Adds what a module needs, and then itself.
    fn visit<'a>(&'a self, name: &str, order: &mut Vec<&'a str>) -> Result<(), Error> {
        // By a list and not by recursion: whoever wrote the directory says how deep it is.
        let mut above: Vec<(&str, std::slice::Iter<'_, String>)> = Vec::new();
        let mut open = BTreeSet::new();
        let mut done: BTreeSet<&str> = order.iter().copied().collect();
        let mut next = Some(name);
        loop {
            if let Some(name) = next
                && !done.contains(name)
                && !self.builtin.contains(name)
            {
                let missing = || Error::NoModule { name: name.to_owned(), dir: self.dir.clone() };
                let (key, module) = self.by_name.get_key_value(name).ok_or_else(missing)?;
                if !open.insert(key.as_str()) {
                    return Err(Error::Circular(name.to_owned()));
                }
                above.push((key, module.needs.iter()));
            }
            let Some((key, needs)) = above.last_mut() else { return Ok(()) };
            next = needs.next().map(String::as_str);
            if next.is_none() {
                order.push(key);
                done.insert(key);
                above.pop();
            }
        }
    }

    /// The ELF file of a module of this name, decompressed. Of a name that several have that is an error.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        if let Some(Module { file, other: Some(other), .. }) = self.by_name.get(name) {
            return Err(self.several(name, [file, other]));
        }
        read_module(&self.path(name))
    }

    fn several(&self, name: &str, pair: [&Path; 2]) -> Error {
        let pair = Box::new(pair.map(Path::to_owned));
        Error::Several { name: name.to_owned(), dir: self.dir.clone(), pair }
    }

    /// The file of a module of this name; empty if there is none.
    pub fn path(&self, name: &str) -> PathBuf {
        self.by_name.get(name).map(|module| module.file.clone()).unwrap_or_default()
    }

    fn parse_dep(&mut self, text: &str) {
        for line in text.lines() {
            let Some((file, needs)) = line.split_once(':') else { continue };
            let Some(name) = module_name(file) else { continue };
            // In modules.dep the list is already complete, outermost first.
            let needs = needs.split_whitespace().rev().filter_map(module_name).collect();
            self.by_name.insert(name, Module { file: self.dir.join(file), needs, other: None });
        }
    }

    /// Looks for modules in all directories below, of at most so many entries. A kernel's own build tree may
    /// have copies, and what was installed from it; but of those of several kernels nobody knows which are
    /// meant.
    fn scan(&mut self, most: u32) -> Result<(), Error> {
        let mut todo = vec![self.dir.clone()];
        let (mut found, mut entries) = (BTreeMap::new(), 0_u32);
        while let Some(dir) = todo.pop() {
            let open = |reason| Error::Open { path: dir.clone(), reason };
            for entry in fs::read_dir(&dir).map_err(open)? {
                let entry = entry.map_err(open)?;
                let path = entry.path();
                entries += 1;
                if entries > most {
                    return Err(Error::TooManyFiles(self.dir.clone()));
                }
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    todo.push(path);
                } else if let Some(name) = path.to_str().and_then(module_name) {
                    match found.entry(name) {
                        Entry::Vacant(place) => {
                            place.insert((path, None));
                        }
                        Entry::Occupied(mut place) => match are_same(&place.get().0, &path) {
                            Some(true) => {}
                            Some(false) => place.get_mut().1 = Some(path),
                            None => return Err(self.several(place.key(), [&place.get().0, &path])),
                        },
                    }
                }
            }
        }
        for (name, (file, other)) in found {
            let needs = depends(&read_module(&file)?);
            self.by_name.insert(name, Module { file, needs, other });
        }
        Ok(())
    }
}

/// Whether two files are one module, which may be stripped or signed in one of them. `None` if they are not
/// known to be of one kernel.
fn are_same(one: &Path, other: &Path) -> Option<bool> {
    let [one, other] = [read_module(one).ok()?, read_module(other).ok()?];
    if one == other {
        return Some(true);
    }
    let [magic, of_other] = [&one, &other].map(|content| Some(vermagic(content)?.to_owned()));
    if magic? != of_other? {
        return None;
    }
    let id = |content| object::File::parse(content).ok()?.build_id().ok()?.map(<[u8]>::to_vec);
    let (id, of_other) = (id(&*one), id(&*other));
    Some(id.is_some() && id == of_other)
}

/// `kernel/net/a-b.ko.xz` is `a_b`; anything else is no module.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let stem = SUFFIXES.iter().find_map(|suffix| file.strip_suffix(suffix))?;
    Some(stem.replace('-', "_"))
}

/// The file, decompressed if its name says that it is compressed.
fn read_module(path: &Path) -> Result<Vec<u8>, Error> {
    let open = |reason| Error::Open { path: path.to_owned(), reason };
    let data = fs::read(path).map_err(open)?;
    let damaged = |reason: String| Error::Damaged { path: path.to_owned(), reason };
    let content = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => unpack(lzma_rust2::XzReader::new(data.as_slice(), true)),
        Some("gz") => unpack(flate2::read::GzDecoder::new(data.as_slice())),
        Some("zst") => zstd::stream::read::Decoder::new(data.as_slice()).and_then(unpack),
        _ => Ok(data),
    };
    let content = content.map_err(|e| damaged(e.to_string()))?;
    if content.starts_with(b"\x7fELF") {
        Ok(content)
    } else {
        Err(damaged("it is not an ELF file".to_owned()))
    }
}

fn unpack(from: impl Read) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let read = from.take(SIZE_MAX).read_to_end(&mut out)?;
    if u64::try_from(read).is_ok_and(|n| n == SIZE_MAX) {
        return Err(io::Error::other("it is far too large"));
    }
    Ok(out)
}

/// The values of a key of a module's `.modinfo`, such as `depends=`.
fn info<'a>(content: &'a [u8], key: &'a str) -> impl Iterator<Item = &'a str> {
    let section = object::File::parse(content)
        .ok()
        .and_then(|elf| elf.section_by_name(".modinfo").and_then(|s| s.data().ok()))
        .unwrap_or_default();
    let texts = section.split(|b| *b == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
    texts.filter_map(move |entry| entry.strip_prefix(key))
}

/// What a module is of: a kernel's release, and the options that change what its modules are.
fn vermagic(content: &[u8]) -> Option<&str> {
    info(content, "vermagic=").next()
}

fn depends(content: &[u8]) -> Vec<String> {
    info(content, "depends=")
        .flat_map(|list| list.split(','))
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn elf() -> Vec<u8> {
        b"\x7fELF not really".to_vec()
    }

    fn dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("kernel/net")).unwrap();
        let dep = "kernel/net/top.ko: kernel/net/mid-dle.ko.gz kernel/base.ko\n\
                   kernel/net/mid-dle.ko.gz: kernel/base.ko\nkernel/base.ko:\n";
        fs::write(dir.path().join("modules.dep"), dep).unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/drivers/in-side.ko\n").unwrap();
        fs::write(dir.path().join("kernel/base.ko"), elf()).unwrap();
        fs::write(dir.path().join("kernel/net/top.ko"), elf()).unwrap();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&elf()).unwrap();
        fs::write(dir.path().join("kernel/net/mid-dle.ko.gz"), gz.finish().unwrap()).unwrap();
        dir
    }

    // A directory that came with an image must not take the process down.
    #[test]
    fn a_long_chain_of_modules_is_followed_to_its_end() {
        const LENGTH: usize = 100_000;
        let dir = tempfile::tempdir().unwrap();
        let line = |n: usize| format!("m{n}.ko: m{}.ko\n", n + 1);
        let mut dep: String = (0..LENGTH).map(line).collect();
        dep.push_str(&format!("m{LENGTH}.ko:\n"));
        fs::write(dir.path().join("modules.dep"), dep).unwrap();
        let modules = Modules::open(dir.path()).unwrap();
        let mut order = Vec::new();
        modules.visit("m0", &mut order).unwrap();
        assert_eq!(order.len(), LENGTH + 1);
        assert_eq!((order[0], order[LENGTH]), (&*format!("m{LENGTH}"), "m0"));
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let dir = dir();
        let modules = Modules::open(dir.path()).unwrap();
        assert_eq!(modules.names().collect::<Vec<_>>(), ["base", "mid_dle", "top"]);
        let loaded = modules.resolve(&["top", "mid-dle", "in_side"]).unwrap();
        assert_eq!(
            loaded.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(),
            ["base", "mid_dle", "top"]
        );
        assert!(loaded.iter().all(|m| m.content == elf()));
    }

    #[test]
    fn what_is_missing_or_damaged_is_named() {
        let dir = dir();
        let modules = Modules::open(dir.path()).unwrap();
        assert!(
            matches!(modules.resolve(&["nothing"]), Err(Error::NoModule { name, .. }) if name == "nothing")
        );
        fs::write(dir.path().join("kernel/net/mid-dle.ko.gz"), "no gzip").unwrap();
        assert!(matches!(modules.resolve(&["top"]), Err(Error::Damaged { .. })));
        fs::remove_file(dir.path().join("kernel/base.ko")).unwrap();
        assert!(matches!(modules.resolve(&["base"]), Err(Error::Open { .. })));
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(Modules::open(empty.path()), Err(Error::NoModules(_))));
    }

    /// A module of that kernel, with a build ID.
    fn module(vermagic: &str, id: u8, more: &str) -> Vec<u8> {
        let names = b"\0.modinfo\0.note\0.names\0";
        let info = format!("vermagic={vermagic}\0depends=\0{more}");
        let note =
            [4_u32.to_le_bytes(), 4_u32.to_le_bytes(), 3_u32.to_le_bytes(), *b"GNU\0", [id; 4]];
        let parts = [
            (0, 0, &[][..]),
            (1, 1, info.as_bytes()),
            (10, 7, note.as_flattened()),
            (16, 3, names),
        ];
        let (mut sections, mut content, size) = (Vec::new(), Vec::new(), 64 * (parts.len() + 1));
        for (name, kind, part) in parts {
            sections.extend([name, kind].into_iter().flat_map(u32::to_le_bytes));
            let offset = (size + content.len()) as u64;
            let words = [0, 0, offset, part.len() as u64, 0, 4, 0];
            sections.extend(words.into_iter().flat_map(u64::to_le_bytes));
            content.extend_from_slice(part);
        }
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([1_u16, 62].into_iter().flat_map(u16::to_le_bytes));
        file.extend([1_u32, 0, 0, 0, 0, 64, 0, 0].into_iter().flat_map(u32::to_le_bytes));
        file.extend([64_u16, 0, 0, 64, 4, 3].into_iter().flat_map(u16::to_le_bytes));
        [file, sections, content].concat()
    }

    // A kernel's build tree has copies of its tests' modules, and perhaps all that was installed from it.
    #[test]
    fn a_module_may_be_there_twice() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, content: &[u8]| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
        };
        file("drivers/a.ko", &module("6.1 SMP", 1, ""));
        file("copy/a.ko", &module("6.1 SMP", 1, ""));
        file("out/lib/modules/a.ko", &module("6.1 SMP", 1, "signed"));
        file("drivers/b.ko", &module("6.1 SMP", 2, ""));
        file("tests/b.ko", &module("6.1 SMP", 3, ""));
        let modules = Modules::open(dir.path()).unwrap();
        assert_eq!(modules.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(modules.resolve(&["a"]).unwrap().len(), 1);
        // Nobody knows which one; but that matters only to who wants it.
        let error = modules.resolve(&["a", "b"]).unwrap_err().to_string();
        assert!(error.contains("several modules b") && error.contains("tests/b.ko"), "{error}");
        assert!(matches!(modules.read("b"), Err(Error::Several { .. })));
        file("old/a.ko", &module("6.0 SMP", 1, ""));
        assert!(
            matches!(Modules::open(dir.path()), Err(Error::Several { name, .. }) if name == "a")
        );
    }

    // Modules were found, or may be behind what was looked at.
    #[test]
    fn a_directory_that_is_too_large_is_called_that() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.ko", "b.ko"] {
            fs::write(dir.path().join(name), elf()).unwrap();
        }
        let scan = |most| {
            let (dir, by_name, builtin) = (dir.path().to_owned(), BTreeMap::new(), BTreeSet::new());
            let mut modules = Modules { dir, by_name, builtin };
            modules.scan(most).map(|()| modules.names().count())
        };
        assert_eq!(scan(2).unwrap(), 2);
        let error = scan(1).unwrap_err().to_string();
        assert!(error.contains("too many files") && !error.contains("has no"), "{error}");
    }

    // Modules of another kernel would be loaded; and to read those of all kernels takes minutes.
    #[test]
    fn a_directory_of_several_kernels_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            // What is read is the first pair at most.
            fs::write(&path, "no ELF file").unwrap();
        };
        file("6.1/kernel/a-b.ko.xz");
        file("6.2/kernel/a_b.ko");
        let error = Modules::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("several modules a_b") && !error.contains('\n'), "{error}");
        assert!(error.contains("6.1/kernel/a-b.ko.xz") && error.contains("6.2/kernel/a_b.ko"));
        assert!(error.contains("like /lib/modules/RELEASE"), "{error}");
        fs::write(dir.path().join("6.1/kernel/a-b.ko.xz"), elf()).unwrap();
        fs::remove_dir_all(dir.path().join("6.2")).unwrap();
        fs::rename(dir.path().join("6.1/kernel/a-b.ko.xz"), dir.path().join("a-b.ko")).unwrap();
        assert_eq!(Modules::open(dir.path()).unwrap().names().collect::<Vec<_>>(), ["a_b"]);
    }

    // Where a build tree is the working directory it is named so, and without modules.dep.
    #[test]
    fn a_directory_may_be_relative() {
        let (here, listed, plain) = (std::env::current_dir().unwrap(), dir(), dir());
        fs::remove_file(plain.path().join("modules.dep")).unwrap();
        for dir in [listed, plain] {
            let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
            let relative = up.join(dir.path().strip_prefix("/").unwrap());
            let modules = Modules::open(&relative).unwrap();
            assert_eq!(modules.read("base").unwrap(), elf());
            assert_eq!(modules.path("base"), relative.join("kernel/base.ko"));
        }
    }

    #[test]
    fn a_circle_is_an_error() {
        let dir = dir();
        fs::write(dir.path().join("modules.dep"), "a.ko: b.ko\nb.ko: a.ko\n").unwrap();
        let modules = Modules::open(dir.path()).unwrap();
        assert!(matches!(modules.resolve(&["a"]), Err(Error::Circular(_))));
    }
}
