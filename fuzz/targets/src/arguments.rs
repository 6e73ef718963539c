//! Paths of `--arg`, on a kernel that has every kind of type.

use crate::kernels::synthetic::{Layout, Machine, Options, build, types};
use std::sync::OnceLock;
use vmtrace::kernel::Kernel;
use vmtrace::kernel::arguments::ArgumentSpec;
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

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    types::PATHS.iter().map(|path| path.as_bytes().to_vec()).collect()
}
