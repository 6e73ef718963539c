//! Instructions as disassembled by capstone.
#![allow(dead_code, reason = "not every test binary uses all of it")]

pub(crate) mod usual;

use capstone::RegAccessType;
use capstone::arch::x86::{ArchMode, X86OperandType};
use capstone::prelude::*;

/// One instruction, of either architecture.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) name: String,
    pub(crate) text: String,
    /// Whole registers that it writes.
    pub(crate) writes: Vec<String>,
    pub(crate) pushed: Option<String>,
    pub(crate) popped: Option<String>,
    /// Where it may branch to.
    pub(crate) target: Option<usize>,
    /// Whether it never goes on to the next one.
    pub(crate) jump: bool,
    /// Whether it leaves the program.
    pub(crate) ending: bool,
    pub(crate) locked: bool,
}

/// Stands for the flags where they are pushed: whoever pops them gets a number.
pub(crate) const FLAGS: &str = "flags";

/// The register that one is part of.
fn whole(name: &str) -> String {
    match name {
        "eax" | "ax" | "al" => "rax".into(),
        "ecx" | "cx" | "cl" => "rcx".into(),
        "edx" | "dx" | "dl" => "rdx".into(),
        "esi" | "sil" => "rsi".into(),
        "edi" | "dil" => "rdi".into(),
        other => other.trim_end_matches(['d', 'b', 'w']).into(),
    }
}

fn number(text: &str) -> usize {
    let text = text.trim();
    text.strip_prefix("0x")
        .map_or_else(|| text.parse(), |hex| usize::from_str_radix(hex, 16))
        .unwrap_or(usize::MAX)
}

/// Up to the first byte that is no instruction.
pub(crate) fn x86_64(code: &[u8]) -> Vec<Instruction> {
    let decoder = Capstone::new().x86().mode(ArchMode::Mode64).detail(true).build().unwrap();
    let all = decoder.disasm_all(code, 0).unwrap();
    let read = |one: &capstone::Insn<'_>| {
        let name = one.mnemonic().unwrap().to_owned();
        let operands = one.op_str().unwrap_or_default().to_owned();
        let detail = decoder.insn_detail(one).unwrap();
        let register = |id| whole(&decoder.reg_name(id).unwrap());
        let implied: &[&str] = match name.rsplit(' ').next().unwrap() {
            "rdtsc" => &["rax", "rdx"],
            "cmpxchg" => &["rax"],
            "stosq" => &["rcx", "rdi"],
            _ => &[],
        };
        let mut writes: Vec<_> = implied.iter().map(|&register| register.into()).collect();
        for operand in detail.arch_detail().x86().unwrap().operands() {
            if let X86OperandType::Reg(id) = operand.op_type {
                let access = operand.access;
                if matches!(access, Some(RegAccessType::WriteOnly | RegAccessType::ReadWrite)) {
                    writes.push(register(id));
                }
            }
        }
        let branch = name.starts_with('j');
        let only = |which: &str| (name == which).then(|| operands.clone());
        Instruction {
            offset: usize::try_from(one.address()).unwrap(),
            len: one.bytes().len(),
            text: format!("{name} {operands}"),
            pushed: only("push").or_else(|| (name == "pushfq").then(|| FLAGS.to_owned())),
            popped: only("pop"),
            target: branch.then(|| number(&operands)),
            // int3 after a return is never reached; were it, that would be the end.
            jump: name == "jmp" || name == "ret" || name == "int3",
            ending: name == "ret",
            locked: name.starts_with("lock") || name.starts_with("xchg"),
            writes,
            name,
        }
    };
    all.iter().map(read).collect()
}

/// Up to the first word that is no instruction.
pub(crate) fn riscv64(code: &[u8]) -> Vec<Instruction> {
    let mode = arch::riscv::ArchMode::RiscV64;
    let decoder = Capstone::new().riscv().mode(mode).build().unwrap();
    let all = decoder.disasm_all(code, 0).unwrap();
    let read = |one: &capstone::Insn<'_>| {
        let name = one.mnemonic().unwrap().to_owned();
        let operands = one.op_str().unwrap_or_default().to_owned();
        let offset = usize::try_from(one.address()).unwrap();
        let store = ["sb", "sh", "sw", "sd"].contains(&&*name) || name.starts_with("fence");
        let ending = name == "ret" || name == "jr";
        let branch = name.starts_with('b') || name == "j";
        let first = operands.split(',').next().unwrap_or_default().to_owned();
        let writes =
            if store || ending || branch || first == "zero" { vec![] } else { vec![first] };
        // Distances, with their signs.
        let distance = operands.rsplit(',').next().unwrap_or_default().trim().to_owned();
        let target = match distance.strip_prefix('-') {
            Some(back) => offset.wrapping_sub(number(back)),
            None => offset.wrapping_add(number(&distance)),
        };
        Instruction {
            offset,
            len: one.bytes().len(),
            text: format!("{name} {operands}"),
            pushed: None,
            popped: None,
            target: branch.then_some(target),
            jump: name == "j" || ending,
            ending,
            locked: false,
            writes,
            name,
        }
    };
    all.iter().map(read).collect()
}
