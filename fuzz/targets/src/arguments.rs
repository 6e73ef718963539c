//! Paths of `--arg`, and print formats of events, on a kernel that has every kind of type.

use crate::kernels::synthetic::{Layout, Machine, Options, build, types};
use std::sync::OnceLock;
use vmtrace::kernel::Kernel;
use vmtrace::kernel::arguments::ArgumentSpec;
use vmtrace::kernel::tracepoints::{Event, EventField, Origin};
use vmtrace::session::{Wants, values};

fn kernels() -> &'static [Kernel; 2] {
    static KERNELS: OnceLock<[Kernel; 2]> = OnceLock::new();
    KERNELS.get_or_init(|| {
        [(Machine::X86, Layout::After), (Machine::Riscv, Layout::AfterBase)].map(
            |(machine, layout)| {
                Kernel::parse(build(&Options::new(machine, layout)).image).expect("a whole kernel")
            },
        )
    })
}

pub(crate) fn run(input: &[u8]) {
    // What the user wrote is repeated to him: not what could not be typed.
    let text = String::from_utf8_lossy(input).replace(char::is_control, " ");
    for kernel in kernels() {
        prints(kernel, &text);
        for site in 0..24 {
            match kernel.path(site, &text) {
                Ok(value) => assert!(!value.name.is_empty()),
                Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?}"),
            }
        }
        for text in [text.as_str(), &format!("function_*: {text}")] {
            let Ok(spec) = ArgumentSpec::parse(text) else { continue };
            assert_eq!(ArgumentSpec::parse(&spec.to_string()).as_ref(), Ok(&spec));
            let wanted = Wants { parameters: true, results: true, paths: vec![spec] };
            let sites: Vec<usize> = (0..24).collect();
            match values(kernel, &sites, &wanted) {
                Ok((_, notes)) => {
                    assert!(notes.iter().all(|note| !note.contains(char::is_control)));
                }
                Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?}"),
            }
        }
    }
}

/// What an image says of how an event is printed.
fn prints(kernel: &Kernel, print: &str) {
    let field = |(name, kind, size, signed): (&str, &str, u32, bool)| EventField {
        name: name.to_owned(),
        kind: kind.to_owned(),
        size,
        signed,
    };
    let fields = [
        ("a", "int", 4, true),
        ("b", "unsigned long", 8, false),
        ("c", "char[16]", 16, false),
        ("d", "unsigned long[6]", 48, false),
        ("e", "__data_loc char[]", 4, false),
    ];
    let event = Event {
        system: String::new(),
        name: String::new(),
        origin: Origin::Other,
        address: 0,
        fields: fields.map(field).to_vec(),
        print: print.to_owned(),
    };
    if let Some(print) = kernel.event_print(&event) {
        assert!(print.matches('{').count() == print.matches('}').count(), "{print}");
    }
    for field in &event.fields {
        kernel.event_form(&event, &field.name);
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let paths = types::PATHS.iter().map(|path| path.as_bytes().to_vec());
    let prints = [
        r#""%d %s", REC->a, __print_symbolic((REC->b >> 3) & (8 - 1), { 1, "x" }, { ~0UL, "y" })"#,
        r#""%s", (REC->b) ? __print_flags(REC->b, "|", {( unsigned long)((1UL) << 3), "x"}) : "none""#,
        r#""%lx %s%s", REC->d[5], __get_str(e), 1 && (REC->a & 0x10) ? "(" REC->c ")" : "-""#,
    ];
    paths.chain(prints.map(|print| print.as_bytes().to_vec())).collect()
}
