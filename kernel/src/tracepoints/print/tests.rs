use super::super::{EventField, Origin};
use super::*;
use crate::btf::{Btf, Words};
use proptest::prelude::*;

/// A type: its name, what it is and how many members it has, its size or what it stands for, and what follows.
type Described<'a> = (&'a str, u32, u32, &'a [(&'a str, u32)]);

const TYPEDEF: u32 = 8 << 24;
const ENUM: u32 = 6 << 24;
const SIGNED: u32 = 1 << 31;

const TYPES: [Described<'_>; 8] = [
    ("unsigned int", 1 << 24, 4, &[("", 32)]),
    ("gfp_t", TYPEDEF, 1, &[]),
    ("unsigned long", 1 << 24, 8, &[("", 64)]),
    ("u64", TYPEDEF, 3, &[]),
    ("", ENUM | 3, 4, &[("IO_BIT", 6), ("FS_BIT", 7), ("TWICE", 1)]),
    ("mode", ENUM | SIGNED | 3, 4, &[("ABS", 0), ("REL", 1), ("NONE", u32::MAX)]),
    ("other", ENUM | 2, 4, &[("TWICE", 2), ("ABS", 0)]),
    ("zone", ENUM | 2, 4, &[("DMA", 0), ("HIGH", 0x8000_0000)]),
];

fn btf() -> Btf {
    let (mut types, mut strings) = (Vec::new(), vec![0_u8]);
    let mut add = |name: &str| {
        if name.is_empty() {
            return 0;
        }
        let at = u32::try_from(strings.len()).unwrap();
        strings.extend(name.bytes().chain([0]));
        at
    };
    for (name, info, size, rest) in TYPES {
        types.extend([add(name), info, size]);
        for (name, value) in rest {
            // What follows an integer is one word.
            if info >> 24 != 1 {
                types.push(add(name));
            }
            types.push(*value);
        }
    }
    let types: Vec<u8> = types.into_iter().flat_map(u32::to_le_bytes).collect();
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
    let head = [0x0001_eb9f, 24, 0, len(&types), len(&types), len(&strings)];
    let head: Vec<u8> = head.into_iter().flat_map(u32::to_le_bytes).collect();
    Btf::parse([head, types, strings].concat()).unwrap()
}

fn event(print: &str) -> Event {
    let kinds = [
        ("dev", "dev_t", 4, false),
        ("int", "int", 4, true),
        ("uint", "unsigned int", 4, false),
        ("byte", "s8", 1, true),
        ("short", "unsigned short", 2, false),
        ("long", "long", 8, true),
        ("ulong", "unsigned long", 8, false),
        ("now", "unsigned long", 8, false),
        ("ptr", "void *", 8, false),
        ("yes", "bool", 1, false),
        ("comm", "char[16]", 16, false),
        ("name", "__data_loc char[]", 4, false),
        ("list", "__data_loc u8[]", 4, false),
        ("args", "unsigned long[6]", 48, false),
        ("text", "const char *", 8, false),
    ];
    let field = |(name, kind, size, signed): (&str, &str, u32, bool)| EventField {
        name: name.to_owned(),
        kind: kind.to_owned(),
        size,
        signed,
    };
    Event {
        system: "test".to_owned(),
        name: "test".to_owned(),
        origin: Origin::Other,
        address: 0,
        fields: kinds.into_iter().map(field).collect(),
        print: print.to_owned(),
    }
}

fn printed(print_fmt: &str) -> Option<String> {
    let (btf, event) = (btf(), event(print_fmt));
    let words = Words::new(&btf);
    print(Meaning { btf: &btf, words: &words, event: &event })
}

fn formed(print_fmt: &str, field: &str) -> Option<String> {
    let (btf, event) = (btf(), event(print_fmt));
    let words = Words::new(&btf);
    form(Meaning { btf: &btf, words: &words, event: &event }, field)
}

#[track_caller]
fn is(print_fmt: &str, ours: &str) {
    assert_eq!(printed(print_fmt).as_deref(), Some(ours), "{print_fmt}");
}

#[track_caller]
fn refused(print_fmt: &str) {
    assert_eq!(printed(print_fmt), None, "{print_fmt}");
}

// As formats of Linux have them, from 5.10 to 7.
#[test]
fn formats_of_the_kernel_are_understood() {
    is(
        r#""comm=%s pid=%d 100%% " "%s", REC->comm, REC->int, __get_str(name)"#,
        "comm={comm} pid={int} 100% {name}",
    );
    is(
        r#""%d,%d %u", ((unsigned int) ((REC->dev) >> 20)), ((unsigned int) ((REC->dev) & ((1U << 20) - 1))), (((REC->short) >> 3) & ((1 << 10) - 1))"#,
        "{dev:bits 20 12},{dev:bits 0 20} {short:bits 3 10}",
    );
    is(
        r#""%s", __print_symbolic((((REC->short) >> 13) & (8 - 1)), { ABS, "none" }, { REL, "rt" })"#,
        "{short:bits 13 3 names 0=none,1=rt}",
    );
    is(
        r#""%s %s", (REC->ulong) ? __print_flags(REC->ulong, "|", {( unsigned long)((( gfp_t)(0x400u|0x800u)) | (( gfp_t)((((1UL))) << (IO_BIT))) | (( gfp_t)((((1UL))) << (FS_BIT)))), "GFP_KERNEL"}, { 0, ((void *)0) } ) : "none", (1 && (REC->ulong & ( unsigned long)(( gfp_t)0x400000u))) ? "true" : "false""#,
        "{ulong:allflags 3264=GFP_KERNEL,0=none} {ulong:bits 22 1 names 0=false,*=true}",
    );
    is(
        r#""timer=%p function=%ps [timeout=%ld] flags=%s", REC->ptr, (void *)REC->ulong, (long)REC->ulong - REC->now, __print_flags(REC->uint & (0x00040000 | 0x00200000), "|", { 0x00040000, "M" }, { 0x00200000, "I" })"#,
        "timer={ptr:p} function=0x{ulong:x} [timeout={ulong:minus now}] flags={uint:flags 262144=M,2097152=I}",
    );
    is(
        r#""irq=%d ret=%s", REC->int, REC->int ? "handled" : "unhandled""#,
        "irq={int} ret={int:names 0=unhandled,*=handled}",
    );
    is(
        r#""%lx, 0x%llx cpu=%03d", REC->args[0], (unsigned long long)REC->args[5], REC->int"#,
        "{args[0]:x}, 0x{args[5]:x} cpu={int:03}",
    );
    is(r#""%s", __print_flags(REC->uint, "", { (1UL << 0), "P" })"#, "{uint:allletters 1=P}");
    is(r#""none""#, "none");
}

// Numbers are printed by what C makes of them on the way, which may be another sign or width.
#[test]
fn signs_and_widths_are_those_of_the_conversion() {
    is(r#""%d %u %x", REC->int, REC->int, REC->int"#, "{int} {int:bits 0 32} {int:bits 0 32 x}");
    is(r#""%d %u %x", REC->uint, REC->uint, REC->uint"#, "{uint:bits 0 32 signed} {uint} {uint:x}");
    is(r#""%llu %lld", REC->long, REC->ulong"#, "{long:bits 0 64} {ulong:bits 0 64 signed}");
    is(
        r#""%d %d %hd", REC->byte, REC->short, REC->short"#,
        "{byte} {short} {short:bits 0 16 signed}",
    );
    is(r#""%d", (u64)REC->ulong & 0xff"#, "{ulong:bits 0 8}");
    is(r#""%lu %d", (unsigned long)REC->ptr, REC->yes"#, "{ptr:bits 0 64} {yes}");
    is(r#""%lx", (long)REC->int"#, "{int:x}");
    is(r#""%d %u", 4 - 5, -1"#, "-1 4294967295");
    // The sign is in all bits of a larger type.
    refused(r#""%x", REC->byte"#);
    refused(r#""%lu", (unsigned long)REC->int"#);
    refused(r#""%u", REC->uint & 0xff0"#);
    refused(r#""%u", REC->uint & 0x5"#);
    // A shift by more than there are bits means nothing.
    refused(r#""%u", REC->uint >> 32"#);
    refused(r#""%u", REC->uint >> -1"#);
    refused(r#""%u", REC->uint & (1 << 99)"#);
}

#[test]
fn choices_are_names() {
    is(r#""%s", REC->int == REL ? "r" : REC->int == 0 ? "a" : "?""#, "{int:names 1=r,0=a,*=?}");
    is(r#""%s", REC->int != -1 ? "a" : "b""#, "{int:names 18446744073709551615=b,*=a}");
    is(r#""%c%d", REC->yes ? 'y' : '-', !!REC->int"#, "{yes:names 0=-,*=y}{int:names 0=0,*=1}");
    is(r#""%s", !(REC->uint & 0x30) ? "a" : "b""#, "{uint:bits 4 2 names 0=a,*=b}");
    is(
        r#""%s", __print_symbolic(REC->int, { NONE, "n" }, { ((enum mode)1), "o" })"#,
        "{int:names 18446744073709551615=n,1=o}",
    );
    is(r#""%s", __print_symbolic(REC->uint, { HIGH, "h" })"#, "{uint:names 2147483648=h}");
    is(
        r#""%s", __print_symbolic(REC->uint & 0x30, { 0, "a" }, { 0x10, "b" }, { 0x20, "c" }, { 0x30, "d" })"#,
        "{uint:bits 4 2 names 0=a,1=b,2=c,3=d}",
    );
    is(r#""%s", 0 ? REC->comm : "x""#, "x");
    // What has no name is printed with the bits where they are.
    refused(r#""%s", __print_symbolic(REC->uint & 0x30, { 0, "a" }, { 0x10, "b" })"#);
    // Two enums have another number for it.
    refused(r#""%s", __print_symbolic(REC->int, { TWICE, "t" })"#);
    refused(r#""%s", __print_symbolic(REC->int, { UNHEARD, "t" })"#);
    for name in ["a,b", "a=b", "a{", "a}"] {
        refused(&format!(r#""%s", __print_symbolic(REC->int, {{ 1, "{name}" }})"#));
        refused(&format!(r#""%s", REC->int ? "{name}" : "b""#));
    }
    // It would stand before everything.
    refused(r#""%s", __print_flags(REC->uint, "|", { 0, "none" }, { 1, "a" })"#);
    refused(r#""%s", __print_flags(REC->uint, ", ", { 1, "a" })"#);
    refused(r#""%s", __print_flags(REC->uint & 0x30, "|", { 0x10, "a" })"#);
}

#[test]
fn what_cannot_be_said_is_refused() {
    for text in [
        r#""%-16s", REC->comm"#,
        r#""%08lx", REC->ulong"#,
        r#""%*d", 3, REC->int"#,
        r#""%pI4", REC->ptr"#,
        r#""%#x", REC->uint"#,
        r#""%d""#,
        r#""a", REC->int"#,
        r#""%d", REC->int, REC->int"#,
        r#""%s", REC->int"#,
        r#""%s", REC->text"#,
        r#""%d", REC->comm"#,
        r#""{%d}", REC->int"#,
        r#""%s", "{int}""#,
        r#""%d\n", REC->int"#,
        r#""%d", REC->nothing"#,
        r#""%s", __get_str(list)"#,
        r#""%lx", REC->args[6]"#,
        r#""%lx", REC->args[-1]"#,
        r#""%lx", REC->args"#,
        r#""%lu", sizeof(int)"#,
        r#""%d", REC->int + 1"#,
        r#""%d", REC->int / 0"#,
        r#""%"#,
        r#""%""#,
        r#""%s", jiffies_to_msecs(REC->ulong)"#,
        r#"REC->int"#,
        "",
        r#""%d" REC->int"#,
        r#""%d", "#,
        r#""%d", (REC->int"#,
        r#""%d", (struct x)REC->int"#,
        r#""%d", (char)REC->int"#,
        r#""%s", REC->comm ? "a" : "b""#,
    ] {
        refused(text);
    }
}

// Whatever the other arguments are.
#[test]
fn one_field_has_its_form() {
    let text = r#""%s %pI4 %u %s", REC->comm, odd(REC->list->x % 3, "\n"), REC->uint >> 22, __print_symbolic(REC->uint, { 1, "a" })"#;
    assert_eq!(printed(text), None);
    assert_eq!(formed(text, "uint").as_deref(), Some("bits 22 10"));
    assert_eq!(formed(text, "comm").as_deref(), Some(""));
    assert_eq!(formed(text, "int"), None);
}

// Images are anybody's.
#[test]
fn depth_and_length_are_bounded() {
    let many = 50_000;
    let nested = |open: &str, close: &str| {
        format!(r#""%d", {}REC->int{}"#, open.repeat(many), close.repeat(many))
    };
    for (open, close) in [
        ("(", ")"),
        ("!", ""),
        ("- ", ""),
        ("~", ""),
        ("(int)", ""),
        ("1 ? ", " : 2"),
        ("1 ? 2 : ", ""),
        ("1 && ", ""),
        ("REC->args[", "]"),
        ("1 | (", ")"),
        ("", ", REC->int"),
    ] {
        let _ = printed(&nested(open, close));
        // Within the length that is looked at.
        let short: String = nested(open, close).chars().take(LONGEST).collect();
        refused(&short);
    }
    // As deep as that of the kernel.
    let deep = format!(r#""%d", {}REC->int{}"#, "(".repeat(16), ")".repeat(16));
    is(&deep, "{int}");
    refused(&format!(r#""{}""#, "a".repeat(LONGEST_FORM + 1)));
}

proptest! {
    #[test]
    fn nothing_panics(text in r#"[ -~]{0,60}"#) {
        let _ = printed(&text);
    }

    #[test]
    fn no_arguments_panic(words in prop::collection::vec(prop::sample::select(vec![
        "REC->int", "REC->args[", "]", "(", ")", "{", "}", ",", "?", ":", "&", ">>", "<<", "-", "~", "!", "==", "1", "63",
        "0xffffffffffffffffUL", "\"a\"", "__print_flags(", "__print_symbolic(", "\"|\"", "(long)", "REC->byte", "(u64)",
        "REC->ulong", "&&", "(void *)", "IO_BIT", "NONE",
    ]), 0..24)) {
        let arguments = words.join(" ");
        for letter in ["d", "s", "lx", "p", "c", "lld"] {
            let _ = printed(&format!("\"%{letter}\", {arguments}"));
        }
    }
}
