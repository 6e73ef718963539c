//! The server of a share, as a process with its sandbox. The tests play the guest.

mod client;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use client::*;
use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use libc::{
    EBADF, EINVAL, ELOOP, ENOENT, ENOSYS, ENOTDIR, EPERM, EROFS, O_RDONLY, O_RDWR, O_WRONLY,
};

/// A shared directory with a file, and what must not be reached beside it.
fn tree() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("shared/sub")).unwrap();
    fs::write(root.path().join("shared/file"), "content").unwrap();
    fs::write(root.path().join("shared/sub/deep"), "deeper").unwrap();
    fs::write(root.path().join("secret"), "nobody's business").unwrap();
    symlink("../secret", root.path().join("shared/link")).unwrap();
    symlink(root.path(), root.path().join("shared/up")).unwrap();
    root
}

fn ended_well(client: Client) {
    assert_eq!(client.end(), (Some(0), String::new()));
}

#[test]
fn files_are_read() {
    let root = tree();
    let mut guest = Client::start(&root.path().join("shared"), false, None);
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, O_RDONLY).unwrap();
    assert_eq!(guest.read(file, handle, 4096).unwrap(), b"content");
    let sub = guest.lookup(ROOT, "sub").unwrap();
    let deep = guest.lookup(sub, "deep").unwrap();
    let handle = guest.open(deep, O_RDONLY).unwrap();
    assert_eq!(guest.read(deep, handle, 3).unwrap(), b"dee");
    assert_eq!(guest.lookup(ROOT, "none"), Err(ENOENT));
    let link = guest.lookup(ROOT, "link").unwrap();
    assert_eq!(guest.ask(op::READLINK, link, &[]).unwrap(), b"../secret");
    let opened = guest.ask(op::OPENDIR, ROOT, &words(&[0, 0])).unwrap();
    let listing = [&opened[..8], &[0; 8], &words(&[4096, 0, 0, 0, 0, 0])].concat();
    for (opcode, what) in [(op::READDIR, "names"), (op::READDIRPLUS, "names and more")] {
        let listed = guest.ask(opcode, ROOT, &listing).unwrap();
        let listed = String::from_utf8_lossy(&listed).into_owned();
        assert!(["file", "sub", "link"].iter().all(|one| listed.contains(one)), "{what}: {listed}");
    }
    guest.ask(op::STATFS, ROOT, &[]).unwrap();
    guest.ask(op::GETATTR, file, &[0; 16]).unwrap();
    guest.ask(op::ACCESS, file, &words(&[4, 0])).unwrap();
    // Nobody answers these, and what comes next is answered as ever.
    guest.send(op::FORGET, deep, &1_u64.to_le_bytes());
    guest.send(op::INTERRUPT, 0, &[0; 8]);
    assert_eq!(guest.ask(op::DESTROY, 0, &[]), Ok(vec![]));
    // Another guest begins, with what is called otherwise by now.
    fs::rename(root.path().join("shared"), root.path().join("renamed")).unwrap();
    guest.begin(0);
    assert!(guest.open(file, O_RDONLY).is_err(), "nobody has told it of that file");
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, O_RDONLY).unwrap();
    assert_eq!(guest.read(file, handle, 4096).unwrap(), b"content");
    ended_well(guest);
}

// A kernel would never ask so; whoever has taken one over would.
#[test]
fn nothing_outside_is_reached_by_any_path() {
    let root = tree();
    let shared = root.path().join("shared");
    for writable in [false, true] {
        let mut guest = Client::start(&shared, writable, None);
        let sub = guest.lookup(ROOT, "sub").unwrap();
        assert_eq!(guest.lookup(ROOT, ".."), Err(EINVAL));
        assert_eq!(guest.lookup(sub, ".."), Err(EINVAL));
        for path in ["../secret", "sub/../../secret", "/etc/passwd", "link/x", "up/secret"] {
            let node = guest.lookup(ROOT, path);
            let read = node.and_then(|node| guest.open(node, O_RDONLY));
            assert!(read.is_err(), "{path} was opened");
        }
        // Links are the guest's to follow; by their own nodes they lead nowhere.
        for link in ["link", "up"] {
            let node = guest.lookup(ROOT, link).unwrap();
            assert!(matches!(guest.open(node, O_RDONLY), Err(EBADF | ELOOP)), "{link}");
            let below = guest.lookup(node, "secret");
            assert!(matches!(below, Err(ENOTDIR | ELOOP)), "{link}: {below:?}");
        }
        // Nodes and handles that nobody was given.
        for node in [0, 2_000, u64::MAX, 3 << 47] {
            assert!(guest.open(node, O_RDONLY).is_err() && guest.read(node, node, 16).is_err());
        }
        if writable {
            for path in ["../evil", "..", ".", "sub/evil", "/tmp/evil", ""] {
                assert!(guest.create(ROOT, path).is_err(), "{path:?} was made");
                let made = guest.ask(op::MKDIR, ROOT, &[words(&[0o755, 0]), name(path)].concat());
                assert!(made.is_err(), "{path:?} was made");
                let to = [&ROOT.to_le_bytes()[..], &name("file"), &name(path)].concat();
                assert!(guest.ask(op::RENAME, ROOT, &to).is_err(), "{path:?}");
            }
            // What is moved out of it while the guest has it: nothing is opened there any more.
            let deep = guest.lookup(sub, "deep").unwrap();
            fs::rename(shared.join("sub"), root.path().join("moved")).unwrap();
            assert_eq!(guest.lookup(sub, ".."), Err(EINVAL));
            if landlock() {
                assert!(guest.open(deep, O_RDONLY).is_err(), "it is outside");
                assert!(guest.create(sub, "evil").is_err(), "made outside");
            }
            fs::rename(root.path().join("moved"), shared.join("sub")).unwrap();
        }
        ended_well(guest);
    }
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    assert_eq!(fs::read_to_string(root.path().join("secret")).unwrap(), "nobody's business");
}

/// Whether this kernel has it.
fn landlock() -> bool {
    let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    rules.handle_access(AccessFs::ReadFile).and_then(Ruleset::create).is_ok()
}

#[test]
fn what_may_only_be_read_stays_as_it_is() {
    let root = tree();
    let shared = root.path().join("shared");
    let before = state(&shared);
    let mut guest = Client::start(&shared, false, None);
    let file = guest.lookup(ROOT, "file").unwrap();
    let handle = guest.open(file, O_RDONLY).unwrap();
    for flags in [O_WRONLY, O_RDWR, O_RDONLY | libc::O_TRUNC] {
        assert_eq!(guest.open(file, flags), Err(EROFS));
    }
    assert_eq!(guest.write(file, handle, b"x"), Err(EROFS));
    assert_eq!(guest.create(ROOT, "new"), Err(EROFS));
    let mut size = words(&[8]);
    size.resize(88, 0);
    let long_name = [&ROOT.to_le_bytes()[..], &name("file"), &name("other")].concat();
    for (opcode, node, body) in [
        (op::SETATTR, file, size),
        (op::MKDIR, ROOT, [words(&[0o755, 0]), name("d")].concat()),
        (op::MKNOD, ROOT, [words(&[0o100_644, 0, 0, 0]), name("n")].concat()),
        (op::UNLINK, ROOT, name("file")),
        (op::RMDIR, ROOT, name("sub")),
        (op::SYMLINK, ROOT, [name("l"), name("x")].concat()),
        (op::LINK, ROOT, [&file.to_le_bytes()[..], &name("h")].concat()),
        (op::RENAME, ROOT, long_name),
        (op::FALLOCATE, file, [&handle.to_le_bytes()[..], &[0; 24]].concat()),
        (op::ACCESS, file, words(&[2, 0])),
    ] {
        assert_eq!(guest.ask(opcode, node, &body), Err(EROFS), "{opcode}");
    }
    ended_well(guest);
    assert_eq!(state(&shared), before);
}

/// Names, lengths, and times of changes.
fn state(directory: &Path) -> Vec<(String, u64, i64, i64)> {
    let mut all: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let data = fs::symlink_metadata(entry.path()).unwrap();
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, data.len(), data.mtime_nsec(), data.ctime_nsec())
        })
        .collect();
    all.sort();
    all
}

/// Everything that changes something, by one who asks as this user.
fn change_everything(guest: &mut Client, shared: &Path) {
    let (file, handle) = guest.create(ROOT, "new").unwrap();
    guest.write(file, handle, &[7; 100_000]).unwrap();
    assert_eq!(guest.read(file, handle, 5).unwrap(), [7; 5]);
    let at = |name: &str| shared.join(name);
    assert_eq!(fs::read(at("new")).unwrap(), [7; 100_000]);
    guest.ask(op::FSYNC, file, &[&handle.to_le_bytes()[..], &[0; 8]].concat()).unwrap();
    let room = [handle, 0, 200_000, 0].map(u64::to_le_bytes).concat();
    guest.ask(op::FALLOCATE, file, &room).unwrap();
    assert_eq!(fs::metadata(at("new")).unwrap().len(), 200_000);
    guest.ask(op::LSEEK, file, &[handle, 0, 3].map(u64::to_le_bytes).concat()).unwrap();
    // Mode, size and both times.
    let mut attributes = words(&[1 | 8 | 128 | 256, 0]);
    attributes.extend([0_u64, 300, 0, 0, 0, 0].iter().flat_map(|one| one.to_le_bytes()));
    attributes.extend(words(&[0, 0, 0, 0o100_600, 0, 0, 0, 0]));
    guest.ask(op::SETATTR, file, &attributes).unwrap();
    let data = fs::metadata(at("new")).unwrap();
    assert_eq!((data.len(), data.permissions().mode() & 0o777), (300, 0o600));
    guest.ask(op::FLUSH, file, &[&handle.to_le_bytes()[..], &[0; 16]].concat()).unwrap();
    guest.ask(op::RELEASE, file, &[&handle.to_le_bytes()[..], &[0; 16]].concat()).unwrap();
    guest.ask(op::LINK, ROOT, &[&file.to_le_bytes()[..], &name("hard")].concat()).unwrap();
    assert_eq!(fs::metadata(at("hard")).unwrap().ino(), data.ino());
    guest.ask(op::SYMLINK, ROOT, &[name("soft"), name("new")].concat()).unwrap();
    assert_eq!(fs::read_link(at("soft")).unwrap(), Path::new("new"));
    let made = guest.ask(op::MKDIR, ROOT, &[words(&[0o755, 0]), name("d")].concat()).unwrap();
    let to = [&long(&made, 0).to_le_bytes()[..], &name("new"), &name("moved")].concat();
    guest.ask(op::RENAME, ROOT, &to).unwrap();
    assert!(at("d/moved").exists() && !at("new").exists());
    let pipe = [words(&[0o010_644, 0, 0, 0]), name("pipe")].concat();
    guest.ask(op::MKNOD, ROOT, &pipe).unwrap();
    for what in ["hard", "soft", "pipe"] {
        guest.ask(op::UNLINK, ROOT, &name(what)).unwrap();
    }
    guest.ask(op::UNLINK, long(&made, 0), &name("moved")).unwrap();
    guest.ask(op::RMDIR, ROOT, &name("d")).unwrap();
}

// A message for each page would be hundreds of times slower.
#[test]
fn a_megabyte_is_one_message() {
    let root = tree();
    let shared = root.path().join("shared");
    let mut guest = Client::start(&shared, true, None);
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    // What Linux can do (6.12), and what it could when this began.
    for (flags, most, pages) in
        [(u32::MAX, 1 << 20, 256), (1 << 5, 128 << 10, 0), (0, 128 << 10, 0)]
    {
        let offered = guest.begin(flags);
        assert_eq!((word(&offered, 20), word(&offered, 28) & 0xffff), (most, pages));
        assert_eq!(word(&offered, 12) & !flags, 0, "what was not wished for");
    }
    let (file, handle) = guest.create(ROOT, "large").unwrap();
    let data: Vec<u8> = (0..1_u32 << 20).map(|at| at.to_le_bytes()[1]).collect();
    assert_eq!(guest.write(file, handle, &data).unwrap()[..4], (1_u32 << 20).to_le_bytes());
    assert!(guest.read(file, handle, 1 << 20).unwrap() == data);
    ended_well(guest);
}

#[test]
fn a_guest_changes_what_it_may_change() {
    let root = tree();
    let shared = root.path().join("shared");
    let before: Vec<_> = state(&shared).into_iter().map(|one| one.0).collect();
    let mut guest = Client::start(&shared, true, None);
    change_everything(&mut guest, &shared);
    let device = [words(&[0o020_644, 0x0103, 0, 0]), name("null")].concat();
    assert_eq!(guest.ask(op::MKNOD, ROOT, &device), Err(EPERM), "a device");
    ended_well(guest);
    assert_eq!(state(&shared).into_iter().map(|one| one.0).collect::<Vec<_>>(), before);
}

// Of a privileged user's share files belong to whom they belong to in the guest; else to that user,
// who may be nobody else.
#[test]
fn files_belong_to_whom_they_can() {
    let root = tree();
    let shared = root.path().join("shared");
    if !nix::unistd::geteuid().is_root() {
        let mut guest = Client::start(&shared, true, None);
        guest.user = 4242;
        change_everything(&mut guest, &shared);
        return ended_well(guest);
    }
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
    let mut guest = Client::start(&shared, true, None);
    guest.user = 4242;
    guest.create(ROOT, "theirs").unwrap();
    guest.user = 0;
    guest.create(ROOT, "ours").unwrap();
    let owner = |name: &str| fs::metadata(shared.join(name)).unwrap().uid();
    assert_eq!((owner("theirs"), owner("ours")), (4242, 0));
    ended_well(guest);
    // An unprivileged user, who must get as far as the directory, and to this program.
    let program = Path::new(assert_cmd::cargo::cargo_bin!("vmtrace"));
    if !program.ancestors().chain(root.path().ancestors()).all(passable) {
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
    }
    if program.ancestors().skip(1).chain(shared.ancestors()).all(passable) {
        let mut guest = Client::start(&shared, true, Some(65534));
        guest.user = 4242;
        change_everything(&mut guest, &shared);
        guest.create(ROOT, "nobodys").unwrap();
        assert_eq!(owner("nobodys"), 65534);
        ended_well(guest);
    }
}

fn passable(directory: &Path) -> bool {
    directory.as_os_str().is_empty()
        || fs::metadata(directory).is_ok_and(|data| data.permissions().mode() & 0o1 != 0)
}

#[test]
fn what_is_no_message_ends_nothing_but_the_share() {
    let root = tree();
    let shared = root.path().join("shared");
    let mut guest = Client::start(&shared, true, None);
    // Too short for what they are, names without an end, and what nobody knows.
    let short = [op::GETATTR, op::READ, op::RENAME, op::SETATTR, op::RELEASE, op::LOOKUP];
    for opcode in short {
        let end = guest.ask(opcode, ROOT, b"\x01\x02");
        assert!(matches!(end, Err(EINVAL | ENOENT)), "{opcode}: {end:?}");
    }
    for opcode in [op::OPEN, op::ACCESS, op::MKNOD] {
        assert_eq!(guest.ask(opcode, ROOT, b""), Err(EINVAL));
    }
    for opcode in [0, 39, 48, 49, 4096, u32::MAX] {
        assert_eq!(guest.ask(opcode, ROOT, &[0xff; 200]), Err(ENOSYS), "{opcode}");
    }
    // More than there can be.
    let huge = [&[0; 16][..], &words(&[u32::MAX, 0, 0, 0, 0, 0])].concat();
    assert!(guest.ask(op::READ, ROOT, &huge).is_err());
    assert!(guest.lookup(ROOT, "file").is_ok(), "it goes on");
    // Where nobody knows where the next one begins.
    guest.raw(&[0; 40]);
    let (code, said) = guest.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("impossible length of 0 bytes"), "{said}");
}

// Random bodies of every kind of request: the process answers or ends with a word, and dies of none.
#[test]
fn random_messages_are_answered() {
    use proptest::prelude::Rng;
    use proptest::test_runner::{RngAlgorithm, TestRng};
    let root = tree();
    let shared = root.path().join("shared");
    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut guest = Client::start(&shared, true, None);
    for _ in 0..3_000 {
        let opcode = random.next_u32() % 54;
        if vmtrace_share::message::is_silent(opcode) || opcode == op::DESTROY {
            continue;
        }
        let length = usize::try_from(random.next_u32() % 150).unwrap();
        let small = random.next_u32().is_multiple_of(2);
        let byte = |random: &mut TestRng| {
            let value = random.next_u32().to_le_bytes()[0];
            if small { value % 4 } else { value }
        };
        let body: Vec<u8> = (0..length).map(|_| byte(&mut random)).collect();
        let _ = guest.ask(opcode, u64::from(random.next_u32() % 4), &body);
    }
    assert!(guest.ask(op::STATFS, ROOT, &[]).is_ok(), "it goes on");
    ended_well(guest);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "outside");
}
