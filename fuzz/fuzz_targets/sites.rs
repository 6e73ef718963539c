//! Call sites: any words in `__mcount_loc`, of any machine.
#![no_main]

mod common;

use common::synthetic::{Options, build};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, words)) = input.split_first() else { return };
    let (machine, layout) = common::KINDS[usize::from(choice) % common::KINDS.len()];
    let mut options = Options::new(machine, layout);
    options.all_symbols = choice < 128;
    // Mostly the upper half of the address space, where kernels are.
    let high = |chunk: &[u8; 4]| u64::from(u32::from_le_bytes(*chunk)) | 0xffff_ffff_0000_0000;
    options.table = Some(words.as_chunks::<4>().0.iter().map(high).collect());
    common::exercise(build(&options).image);
});
