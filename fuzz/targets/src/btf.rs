//! Type information (BTF): the input itself, or a small valid one that the input damages.
use crate::kernels::synthetic::{Options, build};
use vmtrace::kernel::{Btf, Kernel};

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let mut bytes = rest.to_vec();
    if choice & 1 == 1 {
        bytes = crate::kernels::synthetic::btf();
        crate::kernels::damage(&mut bytes, 0, rest);
    }
    let Ok(btf) = Btf::parse(bytes.clone()) else { return };
    for member in ["pid", "comm", "in.z", "in.in.x", "nothing"] {
        btf.member_offset("task_struct", member);
    }
    btf.struct_size("inner");
    for number in (0..).take(btf.len()) {
        btf.type_name(number);
    }
    let (machine, layout) =
        crate::kernels::KINDS[usize::from(choice >> 1) % crate::kernels::KINDS.len()];
    let options = Options { types: Some(bytes), ..Options::new(machine, layout) };
    let Ok(kernel) = Kernel::parse(build(&options).image) else { return };
    crate::kernels::arguments(&kernel);
    // The types of a module, behind those.
    let mut split = crate::kernels::synthetic::btf();
    crate::kernels::damage(&mut split, 0, rest);
    let Ok(types) = kernel.module_types(&split) else { return };
    for name in ["vfs_read", "do_work", "f"] {
        let _ = kernel.module_prototype(&types, [name].into_iter());
        let _ = kernel.tracepoint_prototype(name, Some(&types));
    }
}
