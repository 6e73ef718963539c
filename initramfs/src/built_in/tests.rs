use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use super::*;

/// Path to mode and content.
fn unpack(mut rest: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut files = BTreeMap::new();
    loop {
        let mut reader = cpio::newc::Reader::new(rest).unwrap();
        if reader.entry().is_trailer() {
            return files;
        }
        let mut content = Vec::new();
        reader.read_to_end(&mut content).unwrap();
        files.insert(reader.entry().name().to_owned(), (reader.entry().mode(), content));
        rest = reader.finish().unwrap();
    }
}

#[test]
fn round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let (program, data) = (dir.path().join("program"), dir.path().join("data.txt"));
    fs::write(&program, "#!/init").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(&data, "data").unwrap();
    let module =
        |name: &str| LoadedModule { name: name.to_owned(), content: name.as_bytes().to_vec() };

    let archive = Builder::new()
        .run(Some("ls /"))
        .add_file(&program)
        .add_file(&data)
        .modules(vec![module("base"), module("top")])
        .build()
        .unwrap();
    let files = unpack(&archive);
    assert_eq!(files["program"], (0o100_755, b"#!/init".to_vec()));
    assert_eq!(files["data.txt"], (0o100_644, b"data".to_vec()));
    assert_eq!(files["init"].0, 0o100_755);
    assert_eq!(files["init"].1, AGENT);
    assert_eq!(files["dev/console"].0, 0o020_600);
    assert_eq!(files["bin/ls"], (0o120_777, b"../init".to_vec()));
    assert_eq!(files["vmtrace/run"].1, b"ls /");
    assert_eq!(files["vmtrace/modules/000-base.ko"].1, b"base");
    assert_eq!(files["vmtrace/modules/001-top.ko"].1, b"top");
    // vmtrace itself, in guests that read the trace: `/vmtrace` is a folder.
    let vmtrace = dir.path().join("vmtrace");
    fs::copy(&program, &vmtrace).unwrap();
    let with_vmtrace = unpack(&Builder::new().add_file(&vmtrace).run(Some("ls")).build().unwrap());
    assert_eq!(with_vmtrace["bin/vmtrace"], files["program"]);
    assert_eq!(with_vmtrace["vmtrace/run"].1, b"ls");
    let plain = unpack(&Builder::new().build().unwrap());
    for asked in ["run", "console", "output"] {
        assert!(!plain.contains_key(&format!("vmtrace/{asked}")));
    }
    let taken =
        |apart| unpack(&Builder::new().output(apart).build().unwrap())["vmtrace/output"].1.clone();
    assert_eq!([taken(true), taken(false)], [&b"apart"[..], b"together"]);
    let seated = Builder::new().console(Some((24, 80, "xterm"))).build().unwrap();
    assert_eq!(unpack(&seated)["vmtrace/console"].1, b"24 80 xterm");
}

// A guest of another architecture gets its agent from a vmtrace that was built for it.
#[test]
fn the_agent_can_come_later() {
    let builder = || Builder::new().run(Some("ls /")).without_agent();
    let rest = builder().build().unwrap();
    assert!(!unpack(&rest).contains_key("init"));
    let whole = add_agent(&rest, AgentAs::Init).unwrap();
    assert_eq!(unpack(&whole)["init"].1, AGENT);
    assert_eq!(unpack(&whole)["bin/ls"].0, 0o120_777);
    let second = whole.len() - rest.len();
    assert!(second.is_multiple_of(4) && unpack(&whole[second..]).contains_key("vmtrace/run"));

    let dir = tempfile::tempdir().unwrap();
    let init = dir.path().join("init");
    fs::write(&init, "").unwrap();
    let error = builder().add_file(&init).build().unwrap_err();
    assert!(error.to_string().contains("/init would be"));
}

// A file of ours over one of the user's would change what is booted, and a folder of ours in the place of a link to one
// (`/bin` is one in Debian's) would keep the kernel from making it.
#[test]
fn a_users_initramfs_stays_what_it_is() {
    let own = Archive::new(Vec::new());
    let own = own.finish().unwrap();
    let module = LoadedModule { name: "vsock".to_owned(), content: b"module".to_vec() };
    let builder = || Builder::new().run(Some("ls /")).output(true).modules(vec![module.clone()]);
    let whole = builder().build_before(&own).unwrap();
    let rest = builder().without_agent().build_before(&own).unwrap();
    let later = add_agent(&rest, AgentAs::Beside).unwrap();
    assert!(whole.len().is_multiple_of(4) && whole.ends_with(&own));
    assert!(later.ends_with(&rest) && rest.ends_with(&own));
    let orders =
        ["vmtrace/modules", "vmtrace/modules/000-vsock.ko", "vmtrace/output", "vmtrace/run"];
    let names = |archive: &[u8]| -> Vec<String> { unpack(archive).into_keys().collect() };
    assert_eq!(names(&whole), [&["vmtrace", "vmtrace/agent"][..], &orders].concat());
    assert_eq!(names(&later), ["vmtrace", "vmtrace/agent"]);
    assert_eq!(names(&rest), [&["vmtrace"][..], &orders].concat());
    assert_eq!(unpack(&later)["vmtrace/agent"], (0o100_755, AGENT.to_vec()));

    let dir = tempfile::tempdir().unwrap();
    let (file, clash) = (dir.path().join("file"), dir.path().join("vmtrace"));
    fs::write(&file, "added").unwrap();
    fs::write(&clash, "").unwrap();
    let added = Builder::new().without_agent().add_file(&file).build_before(&own).unwrap();
    assert_eq!(names(&added), ["file", "vmtrace"]);
    assert_eq!(unpack(&added)["file"], (0o100_644, b"added".to_vec()));
    assert!(added.ends_with(&own));
    // It would be where the agent has to be.
    let error = builder().add_file(&clash).build_before(&own).unwrap_err();
    assert!(error.to_string().contains("/vmtrace would be"), "{error}");
}

// A guest of another architecture gets its agent later, which must not undo what is here.
#[test]
fn a_userland_leaves_the_agent_its_names() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("busybox", "\x7fELF"),
        ("applets", "[\nbusybox\ncat\ninit\nls\npoweroff\nsh\nwc\n"),
        ("package", "busybox-static 1\n"),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
    }
    let builder = || Builder::new().userland(Some(Userland::open(dir.path()).unwrap()));
    let whole = unpack(&builder().build().unwrap());
    let rest = builder().without_agent().build().unwrap();
    let mut later = unpack(&add_agent(&rest, AgentAs::Init).unwrap());
    later.extend(unpack(&rest));
    assert_eq!(whole["bin/busybox"], (0o100_755, b"\x7fELF".to_vec()));
    for files in [&whole, &later] {
        let target = |name: &str| std::str::from_utf8(&files[name].1).unwrap();
        for name in APPLETS {
            assert_eq!(target(&format!("bin/{name}")), "../init");
        }
        for name in ["[", "sh", "wc"] {
            assert_eq!(target(&format!("bin/{name}")), "busybox");
        }
        for name in ["cat", "env", "ls"] {
            assert_eq!(target(&format!("usr/bin/{name}")), "../../bin/busybox");
        }
        for name in ["bin/init", "usr/bin/poweroff", "usr/bin/wc"] {
            assert!(!files.contains_key(name), "{name}");
        }
        assert_eq!(target("vmtrace/userland"), "busybox-static 1\n");
        assert!(files["init"].1 == AGENT);
    }
    assert!(!unpack(&Builder::new().build().unwrap()).contains_key("vmtrace/userland"));
}

#[test]
fn every_applet_has_its_link() {
    for applet in APPLETS {
        let code = include_str!("../../../guest-agent/src/applets.rs");
        assert!(code.contains(&format!("\"{applet}\" =>")), "{applet} is not the agent's");
    }
}

#[test]
fn what_cannot_be_added_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("name"), dir.path().join("sub/name"));
    fs::create_dir(dir.path().join("sub")).unwrap();
    fs::write(&a, "").unwrap();
    fs::write(&b, "").unwrap();
    // With all causes, as users see it.
    let message =
        |builder: Builder| format!("{:#}", anyhow::Error::from(builder.build().unwrap_err()));
    assert!(
        message(Builder::new().add_file(&a).add_file(&b))
            .contains("/name would be in the initramfs twice")
    );
    assert!(message(Builder::new().add_file(dir.path())).contains("is not a regular file"));
    assert!(
        message(Builder::new().add_file(dir.path().join("nothing")))
            .ends_with("nothing: No such file or directory (os error 2)")
    );
    // Opened, it would wait for ever.
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(message(Builder::new().add_file(&fifo)).contains("is not a regular file"));
    let init = dir.path().join("init");
    fs::write(&init, "").unwrap();
    assert!(message(Builder::new().add_file(&init)).contains("/init would be"));
}
