//! The instruction set that KVM gives to a vCPU, in the words of a device tree.

use kvm_ioctls::VcpuFd;

use super::registers::Register;
use crate::machine::MachineError;

/// Extensions of one letter in the order that a string of them has, with KVM's numbers (`enum
/// KVM_RISCV_ISA_EXT_ID`). The hypervisor extension is missing: KVM does not nest.
const LETTERS: [(u32, &str); 7] =
    [(5, "i"), (6, "m"), (0, "a"), (3, "f"), (2, "d"), (1, "c"), (15, "v")];

/// The others. Not told is `zkr` (32): each of its reads would be an exit to this program, and
/// guests have a virtio device for entropy.
const NAMES: [(u32, &str); 62] = [
    (7, "svpbmt"),
    (8, "sstc"),
    (9, "svinval"),
    (10, "zihintpause"),
    (11, "zicbom"),
    (12, "zicboz"),
    (13, "zbb"),
    (14, "ssaia"),
    (16, "svnapot"),
    (17, "zba"),
    (18, "zbs"),
    (19, "zicntr"),
    (20, "zicsr"),
    (21, "zifencei"),
    (22, "zihpm"),
    (23, "smstateen"),
    (24, "zicond"),
    (25, "zbc"),
    (26, "zbkb"),
    (27, "zbkc"),
    (28, "zbkx"),
    (29, "zknd"),
    (30, "zkne"),
    (31, "zknh"),
    (33, "zksed"),
    (34, "zksh"),
    (35, "zkt"),
    (36, "zvbb"),
    (37, "zvbc"),
    (38, "zvkb"),
    (39, "zvkg"),
    (40, "zvkned"),
    (41, "zvknha"),
    (42, "zvknhb"),
    (43, "zvksed"),
    (44, "zvksh"),
    (45, "zvkt"),
    (46, "zfh"),
    (47, "zfhmin"),
    (48, "zihintntl"),
    (49, "zvfh"),
    (50, "zvfhmin"),
    (51, "zfa"),
    (52, "ztso"),
    (53, "zacas"),
    (54, "sscofpmf"),
    (55, "zimop"),
    (56, "zca"),
    (57, "zcb"),
    (58, "zcd"),
    (60, "zcmop"),
    (61, "zawrs"),
    (62, "smnpm"),
    (63, "ssnpm"),
    (64, "svade"),
    (65, "svadu"),
    (66, "svvptc"),
    (67, "zabha"),
    (68, "ziccrse"),
    (69, "zaamo"),
    (70, "zalrsc"),
    // Of RV32 alone, but in KVM's numbering.
    (59, "zcf"),
];

/// A kind of hart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Isa {
    /// Names of its extensions, those of one letter first.
    pub(super) extensions: Vec<&'static str>,
    /// The `satp` mode with the most levels: 8 (Sv39), 9 (Sv48) or 10 (Sv57).
    pub(super) satp_mode: u64,
    /// Bytes of a block that is cleaned at once, if it can.
    pub(super) cbom_block: Option<u64>,
    /// Bytes of a block that is zeroed at once, if it can.
    pub(super) cboz_block: Option<u64>,
}

impl Isa {
    /// Of a vCPU.
    pub(super) fn of(fd: &VcpuFd) -> Result<Isa, MachineError> {
        let extensions: Vec<_> = LETTERS
            .iter()
            .chain(&NAMES)
            .filter(|(id, _)| Register::isa(*id).find(fd) == Some(1))
            .map(|(_, name)| *name)
            .collect();
        let block = |name: &str, size: Register| {
            extensions.contains(&name).then(|| size.find(fd)).flatten()
        };
        Ok(Isa {
            satp_mode: Register::SATP_MODE.get(fd)?,
            cbom_block: block("zicbom", Register::CBOM_BLOCK_SIZE),
            cboz_block: block("zicboz", Register::CBOZ_BLOCK_SIZE),
            extensions,
        })
    }

    /// All in one string, for kernels before 6.6.
    pub(super) fn string(&self) -> String {
        let mut text = "rv64".to_owned();
        for name in &self.extensions {
            if name.len() > 1 && !text.ends_with('_') {
                text.push('_');
            }
            text.push_str(name);
        }
        text
    }

    /// `mmu-type`: the deepest page tables it walks.
    pub(super) fn mmu_type(&self) -> &'static str {
        match self.satp_mode {
            10 => "riscv,sv57",
            9 => "riscv,sv48",
            _ => "riscv,sv39",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_extension_has_one_number_and_one_name() {
        let mut all: Vec<_> = LETTERS.iter().chain(&NAMES).collect();
        all.sort_unstable();
        all.dedup_by_key(|(id, _)| *id);
        assert_eq!(all.len(), LETTERS.len() + NAMES.len());
        // All that these bindings know, but for the two that are left out.
        let known = kvm_bindings::KVM_RISCV_ISA_EXT_ID_KVM_RISCV_ISA_EXT_MAX;
        assert_eq!(all.len(), usize::try_from(known).unwrap() - 2);
        assert!(all.iter().all(|(id, _)| *id < known && ![4, 32].contains(id)));
    }

    #[test]
    fn strings() {
        let isa = Isa {
            extensions: vec!["i", "m", "a", "c", "zicsr", "sstc"],
            satp_mode: 9,
            cbom_block: None,
            cboz_block: None,
        };
        assert_eq!((isa.string().as_str(), isa.mmu_type()), ("rv64imac_zicsr_sstc", "riscv,sv48"));
    }
}
