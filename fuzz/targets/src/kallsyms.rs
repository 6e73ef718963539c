//! Symbol tables: the input damages the last third of a plain image, where they are.

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let mut image =
        crate::kernels::images()[usize::from(choice) % crate::kernels::KINDS.len()].clone();
    let first = image.len() * 2 / 3;
    crate::kernels::damage(&mut image, first, rest);
    crate::kernels::exercise(image);
}
