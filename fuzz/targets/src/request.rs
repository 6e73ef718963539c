//! The first line of a connection, and specifications of tracers and triggers. A parsed one that is written and
//! parsed again must be the same. Errors must not repeat control characters.

use vmtrace::serve::{Control, Origin, Request, Source, TracerSpec, TriggerSpec};

pub(crate) fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let lines = ["", "ctl ", "ctl tracer add ", "ctl trigger add mark "];
    for line in lines.map(|before| format!("{before}{text}")).iter().map(String::as_str) {
        let host = Request::parse(line, Origin::Host);
        if let Err(error) = &host {
            assert!(!error.to_string().contains(char::is_control), "{error:?}");
            assert!(error.to_string().len() < 400 + line.len());
        }
        if let Ok(Request::Control(Control::Filter(globs))) = &host {
            let again = Request::parse(&format!("ctl filter {globs}"), Origin::Host);
            assert_eq!(again.as_ref(), host.as_ref());
        }
        // A guest may do nothing that the host may not, and command nothing.
        match Request::parse(line, Origin::Guest) {
            Ok(request) => {
                assert_eq!(Ok(&request), host.as_ref());
                let only = matches!(
                    request,
                    Request::Stream(_) | Request::Control(Control::Mark { ticks: Some(_), .. })
                );
                assert!(only, "{request:?}");
            }
            Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?}"),
        }
    }
    if let Ok(spec) = text.parse::<TracerSpec>() {
        assert_eq!(spec.to_string().parse::<TracerSpec>().as_ref(), Ok(&spec));
    }
    if let Ok(spec) = text.parse::<TriggerSpec>() {
        assert_eq!(spec.to_string().parse::<TriggerSpec>().as_ref(), Ok(&spec));
    }
    if let Ok(source) = text.parse::<Source>() {
        assert_eq!(source.to_string().parse::<Source>().as_ref(), Ok(&source));
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "raw -f vfs_* -n *_read -t vfs",
        "ctl status",
        "filter -f a[bc]?* -n d",
        "mark 17 a b",
        "tracer remove fs",
        "fs=vfs_*,!vfs_read:graph+args+retval",
        "trigger add end a,!b:17 if comm == \"c\"",
        "trigger remove 3",
        "vsock:2:1024",
        "agent",
    ]
    .map(|line| line.as_bytes().to_vec())
    .to_vec()
}
