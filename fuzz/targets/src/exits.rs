//! Exits of functions: damaged code, and damaged tables that describe it.
use crate::kernels::synthetic::code::everything;

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let (image, code, tables) = everything();
    let mut image = image.clone();
    match choice % 3 {
        0 => crate::kernels::damage(&mut image[..4096 + code], 4096, rest),
        1 => crate::kernels::damage(&mut image[..tables.end], tables.start, rest),
        _ => crate::kernels::damage(&mut image, 0, rest),
    }
    crate::kernels::exercise(image);
}
