//! Parameters of functions, from type information made by hand: all calling conventions and shapes,
//! and damaged data.

mod builder;

use builder::types::{PATHS, SIGNED, Types};
use builder::{Layout, Machine, Options, build};
use proptest::prelude::*;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::arguments::{
    Fetch, Last, NoPrototype, PathProblem, Prototype, Shape, Source, Value,
};

const MACHINES: [(Machine, Layout); 2] =
    [(Machine::X86, Layout::After), (Machine::Riscv, Layout::AfterBase)];

fn kernel(machine: usize, types: Option<Vec<u8>>) -> Kernel {
    let (machine, layout) = MACHINES[machine];
    let options = Options { types, ..Options::new(machine, layout) };
    Kernel::parse(build(&options).image).unwrap()
}

fn both(types: &Types) -> [Kernel; 2] {
    [0, 1].map(|machine| kernel(machine, Some(types.finish())))
}

fn site(kernel: &Kernel, function: &str) -> usize {
    kernel.select(&[function.to_owned()], &[]).unwrap()[0]
}

fn prototype(kernel: &Kernel, function: &str) -> Prototype {
    let site = site(kernel, function);
    kernel.prototype(site).unwrap_or_else(|| panic!("{function}: {:?}", kernel.no_prototype(site)))
}

/// The words of each parameter; of those that are left out none.
fn words(kernel: &Kernel, function: &str, names: &[&str]) -> Vec<Vec<u8>> {
    let prototype = prototype(kernel, function);
    let words = |name: &&str| {
        let value = prototype.parameters.iter().find(|value| value.name == **name);
        value.map_or(vec![], |value| match &value.fetch {
            Fetch::Argument(word) => vec![*word],
            Fetch::Words(words) => words.clone(),
            other => panic!("{other:?}"),
        })
    };
    names.iter().map(words).collect()
}

// The words are those that gcc 12 reads for the same functions in C, by its assembly (-O1; for
// riscv64 -march=rv64imac -mabi=lp64): one that is wrong shows what another parameter has.
#[test]
fn words_are_those_of_the_calling_conventions() {
    let mut types = Types::default();
    let (int, long) = (types.int("int", 4, SIGNED), types.int("long", 8, SIGNED));
    let letter = types.int("char", 1, 0);
    let wide = types.int("__int128", 16, SIGNED);
    let two = types.strukt("two", 16, &[("a", long, 0, 0), ("b", long, 64, 0)]);
    let members = [("a", long, 0, 0), ("b", long, 64, 0), ("c", long, 128, 0)];
    let three = types.strukt("three", 24, &members);
    let none = types.strukt("none", 0, &[]);
    let packed = types.strukt("packed", 9, &[("c", letter, 0, 0), ("l", long, 8, 0)]);
    let named = |parameters: &[u32]| -> Vec<(&'static str, u32)> {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"];
        names.into_iter().zip(parameters.iter().copied()).collect()
    };
    // Parameters, then their words on x86-64 and on riscv64.
    type Case<'a> = (u32, &'a [u32], &'a [&'a [u8]], &'a [&'a [u8]]);
    let cases: [Case<'_>; 10] = [
        (
            long,
            &[int, int, int, int, int, two, int, int],
            &[&[0], &[1], &[2], &[3], &[4], &[6, 7], &[5], &[8]],
            &[&[0], &[1], &[2], &[3], &[4], &[5, 6], &[7], &[8]],
        ),
        (
            long,
            &[int, int, int, int, int, wide, int, int],
            &[&[0], &[1], &[2], &[3], &[4], &[6, 7], &[5], &[8]],
            &[&[0], &[1], &[2], &[3], &[4], &[5, 6], &[7], &[8]],
        ),
        (
            long,
            &[packed, none, int, three, int],
            &[&[6, 7], &[], &[0], &[], &[1]],
            &[&[0, 1], &[], &[2], &[3], &[4]],
        ),
        (three, &[int], &[&[1]], &[&[1]]),
        (
            long,
            &[int, int, int, int, int, int, int, two, int],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7, 8], &[9]],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7, 8], &[9]],
        ),
        (
            long,
            &[int, int, int, int, int, int, int, int, int, wide, int],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7], &[8], &[10, 11], &[12]],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7], &[8], &[10, 11], &[12]],
        ),
        (long, &[int, wide, int], &[&[0], &[1, 2], &[3]], &[&[0], &[1, 2], &[3]]),
        (
            long,
            &[int, int, int, int, int, int, int, wide, int],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[8, 9], &[10]],
            &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7, 8], &[9]],
        ),
        (packed, &[int], &[&[1]], &[&[0]]),
        (two, &[int], &[&[0]], &[&[0]]),
    ];
    for (i, (result, parameters, _, _)) in cases.iter().enumerate() {
        types.function(&format!("function_{}", 20 + i), *result, &named(parameters));
    }
    let kernels = both(&types);
    for (i, (_, parameters, x86, riscv)) in cases.iter().enumerate() {
        let function = format!("function_{}", 20 + i);
        let names: Vec<&str> = named(parameters).into_iter().map(|(name, _)| name).collect();
        for (kernel, expected) in kernels.iter().zip([x86, riscv]) {
            let arch = kernel.arch();
            assert_eq!(words(kernel, &function, &names), **expected, "{arch:?} {function}");
        }
    }
    let [x86, riscv] = &kernels;
    let left_out = |kernel| prototype(kernel, "function_22").left_out;
    assert_eq!(left_out(x86), ["b", "d"], "empty, and in four slots");
    assert_eq!(left_out(riscv), ["b"]);
    let shape = |kernel| prototype(kernel, "function_22").parameters.remove(0).shape;
    assert_eq!((shape(x86), shape(riscv)), (Shape::Raw { bytes: 9 }, Shape::Raw { bytes: 9 }));
    let d = prototype(riscv, "function_22").parameters.remove(2);
    assert_eq!((d.name.as_str(), d.shape), ("d", Shape::Pointer), "by reference");
    // What the members of a large struct have.
    let path = |kernel: &Kernel| kernel.path(site(kernel, "function_22"), "d.c").unwrap().fetch;
    assert_eq!(path(x86), Fetch::Argument(10));
    let last = Last::Word { offset: 16, size: 8 };
    assert_eq!(path(riscv), Fetch::Memory { from: Source::Argument(3), hops: vec![], last });
    let result = |kernel| prototype(kernel, "function_23").result.map(|value| value.shape);
    assert_eq!((result(x86), result(riscv)), (Some(Shape::Pointer), None), "returned in memory");
    let result = |kernel| prototype(kernel, "function_29").result.map(|value| value.shape);
    assert_eq!(result(x86), Some(Shape::Raw { bytes: 8 }), "the first of two words");
}

// What the kernels in the cache have nowhere, or not for sure.
#[test]
fn parameters_have_all_shapes() {
    for machine in [0, 1] {
        let kernel = kernel(machine, None);
        let read = prototype(&kernel, "vfs_read");
        let (parameters, result) = (read.parameters, read.result.unwrap());
        let text = Last::Text { offset: 0, max: 32 };
        let text = Fetch::Memory { from: Source::Argument(1), hops: vec![], last: text };
        let expected = [
            ("task", Fetch::Argument(0)),
            ("name", text),
            ("in", Fetch::Argument(2)),
            ("wide", Fetch::Words(vec![3, 4])),
            ("mode", Fetch::Argument(5)),
            ("arg6", Fetch::Argument(6)),
            ("uid", Fetch::Argument(7)),
        ];
        let found: Vec<(&str, Fetch)> =
            parameters.iter().map(|v| (v.name.as_str(), v.fetch.clone())).collect();
        assert_eq!(found, expected, "the dots of a variadic function are no parameter");
        let names = [(-1, "NONE"), (0, "READ"), (1, "WRITE")];
        let names = names.map(|(value, name)| (value, name.to_owned())).into();
        let shapes: Vec<Shape> = parameters.into_iter().map(|value| value.shape).collect();
        let expected = [
            Shape::Pointer,
            Shape::Text,
            Shape::Raw { bytes: 8 },
            Shape::Raw { bytes: 16 },
            Shape::Enum { bytes: 4, signed: true, names },
            Shape::Bool,
            Shape::Signed { bytes: 4 },
        ];
        assert_eq!(shapes, expected);
        assert_eq!((result.fetch, result.shape), (Fetch::Result, Shape::Signed { bytes: 4 }));

        let write = prototype(&kernel, "vfs_write").parameters;
        let shape = |name: &str| write.iter().find(|v| v.name == name).unwrap().shape.clone();
        assert_eq!(shape("user"), Shape::Pointer, "a process's memory is no text");
        assert_eq!(shape("byte"), Shape::Unsigned { bytes: 1 });
        assert_eq!(shape("c"), Shape::Char);
        let names = [(1_i64 << 40, "HIGH".to_owned())].into();
        assert_eq!(shape("flags"), Shape::Enum { bytes: 8, signed: false, names });

        let why = |function| kernel.no_prototype(site(&kernel, function));
        assert_eq!(why("function_2"), None, "two functions of one type");
        assert_eq!(why("function_1"), Some(NoPrototype::Ambiguous));
        assert_eq!(why("function_3"), Some(NoPrototype::Unknown));
        assert_eq!(kernel.no_prototype(7), Some(NoPrototype::NoName));
        assert_eq!(kernel.no_prototype(9999), Some(NoPrototype::NoName));
        let (machine, layout) = MACHINES[machine];
        let plain = Options { btf: false, ..Options::new(machine, layout) };
        let plain = Kernel::parse(build(&plain).image).unwrap();
        assert_eq!(plain.no_prototype(10), Some(NoPrototype::NoTypes));
        assert_eq!(plain.raw_arguments()[1].shape, Shape::Raw { bytes: 8 });
    }
}

// Older pahole keeps the first of several functions of one name, whose parameters need not be
// those of the others.
#[test]
fn what_is_known_of_a_name_is_not_taken_for_another_function_of_it() {
    let mut types = Types::default();
    let int = types.int("int", 4, SIGNED);
    let function = types.function("dup_static", 0, &[("a", int)]);
    let options =
        |types| Options { types: Some(types), ..Options::new(Machine::X86, Layout::After) };
    let open = |types: &Types| Kernel::parse(build(&options(types.finish())).image).unwrap();
    let old = open(&types);
    let site = site(&old, "dup_static");
    assert_eq!(old.no_prototype(site), Some(NoPrototype::Ambiguous));
    types.kfunc(function);
    assert_eq!(open(&types).prototype(site).map(|p| p.parameters.len()), Some(1));
}

#[test]
fn paths_lead_to_parts_of_words_and_to_memory() {
    let kernel = kernel(0, None);
    let path = |function, path| kernel.path(site(&kernel, function), path);
    let found = |function, text| {
        path(function, text).map(|v: Value| (v.fetch, v.shape)).map_err(|error| error.problem)
    };
    let bits = |shift, width| Shape::Bits { shift, width, signed: true };
    let read = |text| found("vfs_read", text);
    assert_eq!(read("in.x"), Ok((Fetch::Argument(2), Shape::Signed { bytes: 4 })));
    assert_eq!(read("in.y"), Ok((Fetch::Argument(2), bits(32, 3))), "in a word");
    assert_eq!(read("in.z"), Ok((Fetch::Argument(2), bits(41, 5))));
    let memory =
        |hops: &[i32], last| Fetch::Memory { from: Source::Argument(0), hops: hops.into(), last };
    let word = |offset, size| memory(&[], Last::Word { offset, size });
    assert_eq!(read("task->in.z"), Ok((word(29, 1), bits(1, 5))));
    assert_eq!(read("task[2].pid"), Ok((word(64, 4), Shape::Signed { bytes: 4 })));
    assert_eq!(read("task[0].comm[3]"), Ok((word(20, 4), Shape::Signed { bytes: 4 })));
    let bytes = |offset, size| memory(&[], Last::Bytes { offset, size });
    assert_eq!(read("task->comm"), Ok((bytes(8, 16), Shape::Raw { bytes: 16 })));
    assert_eq!(read("task[1]"), Ok((bytes(32, 32), Shape::Raw { bytes: 32 })));
    assert_eq!(read("wide"), Ok((Fetch::Words(vec![3, 4]), Shape::Raw { bytes: 16 })));
    assert_eq!(read("arg6"), Ok((Fetch::Argument(6), Shape::Bool)));
    assert_eq!(read("task->comm[4]"), Err(PathProblem::Bounds { count: 4 }));
    assert_eq!(read("task->in->x"), Err(PathProblem::NoPointer { of: "inner_t".to_owned() }));
    assert_eq!(read("task->comm:3"), Err(PathProblem::NotText { of: "array".to_owned() }));
    assert_eq!(read("task[2000000000].pid"), Err(PathProblem::Far));

    let write = |text| found("vfs_write", text);
    // On the stack as a whole, one word behind the address of the room for the result.
    assert_eq!(write("big.task"), Ok((Fetch::Argument(6), Shape::Pointer)));
    let text = |from, offset, hops, max| {
        let last = Last::Text { offset, max };
        Ok((Fetch::Memory { from: Source::Argument(from), hops, last }, Shape::Text))
    };
    assert_eq!(write("big.name:100"), text(7, 0, vec![], 100));
    assert_eq!(
        write("big.list[9]"),
        Ok((Fetch::Argument(9), Shape::Bits { shift: 8, width: 8, signed: false }))
    );
    assert_eq!(write("big.list:7"), Err(PathProblem::NoWord));
    assert_eq!(write("big"), Err(PathProblem::NoWord));
    assert_eq!(write("user"), Ok((Fetch::Argument(1), Shape::Pointer)));
    assert_eq!(write("user[0]"), Err(PathProblem::User));
    let of = "struct unknown".to_owned();
    assert_eq!(write("big.unknown->x"), Err(PathProblem::Incomplete { of }));
    let last = Last::Bytes { offset: 16, size: 40 };
    let list = Fetch::Memory { from: Source::Result, hops: vec![], last };
    assert_eq!(write("$ret.list"), Ok((list, Shape::Raw { bytes: 40 })), "in memory");
    let last = Last::Text { offset: 16, max: 30 };
    let list = Fetch::Memory { from: Source::Result, hops: vec![], last };
    assert_eq!(write("$ret.list:30"), Ok((list, Shape::Text)));
}

// Type information of older kernels has bit fields in their types, and some has a name only where
// a struct is used; what tracing does not follow must be told.
#[test]
fn paths_know_old_bit_fields_forward_declarations_and_limits() {
    let mut types = Types::default();
    let int = types.int("int", 4, SIGNED);
    let narrow = types.raw("narrow", (1, 0, false), 4, &[SIGNED << 24 | 5 << 16 | 3]);
    let later = types.forward("later");
    let pointer = types.pointer(later);
    let members = [("n", narrow, 32, 0), ("next", pointer, 64, 0), ("w", int, 126, 31)];
    let node = types.strukt("later", 24, &members);
    let node = types.pointer(node);
    types.function("vfs_read", 0, &[("node", node), ("later", pointer)]);
    for kernel in both(&types) {
        let read = |text: &str| {
            let value = kernel.path(site(&kernel, "vfs_read"), text);
            value.map(|value| (value.fetch, value.shape)).map_err(|error| error.problem)
        };
        let memory = |from, hops: Vec<i32>, offset, size| Fetch::Memory {
            from: Source::Argument(from),
            hops,
            last: Last::Word { offset, size },
        };
        let bits = |shift, width| Shape::Bits { shift, width, signed: true };
        assert_eq!(read("node->n"), Ok((memory(0, vec![], 4, 1), bits(5, 3))));
        assert_eq!(read("later->n"), Ok((memory(1, vec![], 4, 1), bits(5, 3))));
        let wide = memory(0, vec![8], 15, 8);
        assert_eq!(read("node->next->w"), Ok((wide, bits(6, 31))), "aligned to nothing");
        let long = |hops: usize| format!("node{}", "->next".repeat(hops + 1));
        assert_eq!(read(&long(16)), Ok((memory(0, vec![8; 16], 8, 8), Shape::Pointer)));
        assert_eq!(read(&long(17)), Err(PathProblem::Long));
        assert_eq!(read("later[1].n"), Ok((memory(1, vec![], 28, 1), bits(5, 3))));
    }
}

// Types that contain themselves, by every way there is: a guest's kernel may be made to harm.
#[test]
fn endless_types_come_to_an_end() {
    let mut types = Types::default();
    // Each refers to the next one, or to itself.
    let endless = types.typedef("endless", 1);
    let array = types.array(2, 2);
    let inside = types.strukt("inside", 8, &[("", 3, 0, 0)]);
    let twice = types.strukt("twice", 8, &[("", 4, 0, 0), ("", 4, 0, 0)]);
    let pointer = types.pointer(5);
    let huge = types.strukt("huge", u32::MAX, &[("a", 7, u32::MAX, 0), ("b", 8, 8, 0)]);
    let huge_array = types.array(6, u32::MAX);
    let missing = types.strukt("missing", 8, &[("a", 9999, 0, 0)]);
    let integer = types.int("integer", u32::MAX, SIGNED);
    let integers = types.strukt("integers", 16, &[("a", integer, 0, 0), ("x", integer, 9, 200)]);
    let parameters = [
        endless, array, inside, twice, pointer, huge, huge_array, missing, integer, integers, 9999,
    ];
    for (i, parameter) in parameters.into_iter().enumerate() {
        let name = format!("function_{}", 11 + 2 * i);
        types.function(&name, parameter, &[("p", pointer), ("a", parameter)]);
        types.function(&format!("function_{}", 12 + 2 * i), 0, &[("a", parameter)]);
    }
    for kernel in both(&types) {
        for site in 0..60 {
            if kernel.prototype(site).is_none() {
                assert!(kernel.no_prototype(site).is_some());
            }
            for path in ["a", "a.a", "a.x", "a[0]", "a[7].a", "p->x", "p[1]", "$ret", "$ret.a.a"] {
                let _ = kernel.path(site, path).map_err(|error| error.to_string());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn damaged_types_are_no_problem(
        damage in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![0..40_u8, any::<u8>()]),
            1..8,
        ),
        machine in 0..2_usize,
    ) {
        let mut types = builder::btf();
        for (place, byte) in damage {
            // Behind the header, or nothing is left to look at.
            let at = 24 + place.index(types.len() - 24);
            types[at] = byte;
        }
        let kernel = kernel(machine, Some(types));
        for site in 0..20 {
            prop_assert_eq!(kernel.prototype(site).is_none(), kernel.no_prototype(site).is_some());
            for path in PATHS {
                if let Err(error) = kernel.path(site, path) {
                    prop_assert!(path.get(error.at.clone()).is_some());
                    prop_assert!(!error.to_string().contains(char::is_control));
                }
            }
        }
    }
}
