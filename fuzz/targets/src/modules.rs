//! A directory of kernel modules, and the initramfs made of it. The input is a `modules.dep`, and
//! damage to the modules.

use crate::input::Input;
use crate::kernels::damage;
use std::collections::BTreeSet;
use std::io::Read;
use std::sync::OnceLock;
use vmtrace::initramfs::{Builder, Modules};

/// A module that needs two others.
fn module() -> &'static [u8] {
    static MODULE: OnceLock<Vec<u8>> = OnceLock::new();
    MODULE.get_or_init(|| {
        let info = b"license=GPL\0depends=b-c,a\0name=m\0";
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([1, 0, 62, 0, 1, 0, 0, 0]);
        let table = 64 + info.len() + names.len();
        for word in [0, 0, table as u64] {
            file.extend(word.to_le_bytes());
        }
        file.extend([0; 4]);
        // This header, no segments, three sections, of which the last has the names.
        for half in [64_u16, 0, 0, 64, 3, 2] {
            file.extend(half.to_le_bytes());
        }
        file.extend(info);
        file.extend(names);
        // Name, type, place, bytes.
        for (name, kind, at, len) in
            [(0, 0, 0, 0), (1, 1, 64, info.len()), (10, 3, 64 + info.len(), names.len())]
        {
            file.extend([u32::to_le_bytes(name), u32::to_le_bytes(kind)].concat());
            for word in [0, 0, at as u64, len as u64, 0, 1, 0] {
                file.extend(word.to_le_bytes());
            }
        }
        file
    })
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let Ok(dir) = tempfile::tempdir() else { return };
    let length = usize::from(input.short());
    let dep = input.take(length);
    if choice & 1 == 0 && std::fs::write(dir.path().join("modules.dep"), dep).is_err() {
        return;
    }
    let mut content = module().to_vec();
    damage(&mut content, 0, input.take(usize::MAX));
    let (suffix, packed) = match choice >> 1 & 3 {
        1 => (".ko.zst", zstd::bulk::compress(&content, 1).expect("in memory")),
        // Not what the name says.
        2 => (".ko.xz", content.clone()),
        3 => (".ko.gz", content.clone()),
        _ => (".ko", content.clone()),
    };
    for name in ["m", "a", "b-c"] {
        if std::fs::write(dir.path().join(format!("{name}{suffix}")), &packed).is_err() {
            return;
        }
    }
    let Ok(modules) = Modules::open(dir.path()) else { return };
    let names: Vec<String> = modules.names().map(str::to_owned).take(8).collect();
    for name in names.iter().map(String::as_str).chain(["m", "none"]) {
        let Ok(loaded) = modules.resolve(&[name]) else { continue };
        let unique: BTreeSet<_> = loaded.iter().map(|module| module.name.clone()).collect();
        assert_eq!(unique.len(), loaded.len(), "each once");
        let expected: Vec<_> = loaded.iter().map(|module| module.content.clone()).collect();
        let Ok(archive) = Builder::new().run(Some("true")).without_agent().modules(loaded).build()
        else {
            continue;
        };
        assert_eq!(packed_modules(&archive), expected);
    }
}

/// The modules in an archive, as the kernel would unpack it.
fn packed_modules(mut rest: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    loop {
        let mut reader = cpio::newc::Reader::new(rest).expect("our own archive");
        if reader.entry().is_trailer() {
            return found;
        }
        let is_module = reader.entry().name().starts_with("vmtrace/modules/");
        let mut content = Vec::new();
        reader.read_to_end(&mut content).expect("our own archive");
        if is_module {
            found.push(content);
        }
        rest = reader.finish().expect("our own archive");
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let dep = b"k/m.ko: k/b-c.ko a.ko\nb-c.ko: a.ko\na.ko:\n";
    let length = u16::try_from(dep.len()).expect("short").to_le_bytes();
    let of = |choice: u8| [&[choice][..], &length, dep].concat();
    vec![of(0), of(1), of(2), of(3), of(4), of(6)]
}
