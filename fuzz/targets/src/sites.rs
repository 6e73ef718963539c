//! Call sites: arbitrary words in `__mcount_loc`, on each architecture.
use crate::kernels::synthetic::{Options, build};

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, words)) = input.split_first() else { return };
    let (machine, layout) =
        crate::kernels::KINDS[usize::from(choice) % crate::kernels::KINDS.len()];
    let mut options = Options::new(machine, layout);
    options.all_symbols = choice < 128;
    // Mostly the upper half of the address space, where kernels are.
    let high = |chunk: &[u8; 4]| u64::from(u32::from_le_bytes(*chunk)) | 0xffff_ffff_0000_0000;
    options.table = Some(words.as_chunks::<4>().0.iter().map(high).collect());
    crate::kernels::exercise(build(&options).image);
}
