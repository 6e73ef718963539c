//! The numbers of pages, by the kernel's array of `struct page` (`page_to_pfn` with
//! `CONFIG_SPARSEMEM_VMEMMAP`, include/asm-generic/memory_model.h).

use super::{Arch, Kernel};

/// Where the array begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageArray {
    /// Link addresses of the variables of 8 bytes that say so, once the kernel runs.
    pub variables: Vec<u64>,
    /// Bytes of a `struct page`.
    size: u64,
    start: Start,
}

/// How the variables say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// The first is its address (x86-64).
    Address,
    /// The first is where memory is mapped, the second the number of the first page (riscv64).
    Below,
    /// The same with the first page's address.
    BelowAddress,
}

/// Bits of an address within a page.
const PAGE: u32 = 12;

impl PageArray {
    /// The number of a page by the address of its `struct page`, with what the variables say; `u64::MAX`,
    /// as the kernel has it, for none.
    #[must_use]
    pub fn number(&self, page: u64, variables: &[u64]) -> u64 {
        if page == 0 {
            return u64::MAX;
        }
        let variable = |number| variables.get(number).copied().unwrap_or(0);
        let start = match self.start {
            Start::Address => variable(0),
            Start::Below => self.below(variable(0), variable(1)),
            Start::BelowAddress => self.below(variable(0), variable(1) >> PAGE),
        };
        page.wrapping_sub(start).checked_div(self.size).unwrap_or(0)
    }

    /// `vmemmap` of arch/riscv/include/asm/pgtable.h, which depends on the levels of page tables. Memory is
    /// mapped elsewhere with each number of them.
    fn below(&self, page_offset: u64, first: u64) -> u64 {
        let (bits, top) = match page_offset {
            0xffff_ffc0_0000_0000.. => (39, 30),
            0xffff_8000_0000_0000.. => (48, 39),
            _ => (57, 48),
        };
        let vmalloc = 1_u64 << (top + 8 - 2);
        let log = self.size.max(1).next_power_of_two().trailing_zeros().min(PAGE);
        let array = 1_u64 << (bits - PAGE - 1 + log);
        page_offset
            .wrapping_sub(vmalloc)
            .wrapping_sub(array)
            .wrapping_sub(first.wrapping_mul(self.size))
    }
}

impl Kernel {
    /// How the numbers of pages follow from addresses of their `struct page`; `None` if the image does not
    /// tell.
    #[must_use]
    pub fn page_array(&self) -> Option<PageArray> {
        let btf = self.btf().ok()?;
        let size = btf.struct_size("page").filter(|size| *size > 0)?.into();
        // How it computes the address of a page from its number stands in how it prints that.
        let events = self.events().ok()?;
        let print = &events.iter().find(|event| event.name == "mm_page_free")?.print;
        let variable =
            |name: &str| print.contains(name).then(|| self.symbols().address(name)).flatten();
        let (variables, start) = match self.arch() {
            Arch::X86_64 => (vec![variable("vmemmap_base")?], Start::Address),
            Arch::Riscv64 => {
                let member = btf.member_offset("kernel_mapping", "page_offset")?;
                let mapped = variable("kernel_map")?.checked_add(member.into())?;
                // Before 6.8 the array began with page 0.
                let (first, start) =
                    match (variable("vmemmap_start_pfn"), variable("phys_ram_base")) {
                        (Some(first), _) => (Some(first), Start::Below),
                        (None, Some(first)) => (Some(first), Start::BelowAddress),
                        (None, None) => (None, Start::Below),
                    };
                ([mapped].into_iter().chain(first).collect(), start)
            }
        };
        Some(PageArray { variables, size, start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Documentation/arch/x86/x86_64/mm.rst, and Documentation/arch/riscv/vm-layout.rst: a number that is
    // not the kernel's own is of other memory.
    #[test]
    fn pages_have_the_numbers_that_the_kernel_gives_them() {
        let array = |start| PageArray { variables: Vec::new(), size: 64, start };
        let x86 = array(Start::Address);
        assert_eq!(x86.number(0xffff_ea00_0000_4000, &[0xffff_ea00_0000_0000]), 0x100);
        assert_eq!(x86.number(0, &[0xffff_ea00_0000_0000]), u64::MAX);
        // Without what it would need.
        assert_eq!(x86.number(0x4000, &[]), 0x100);
        assert_eq!(PageArray { size: 0, ..x86 }.number(0x4000, &[]), 0);
        let riscv = array(Start::Below);
        for (mapped, start) in [
            (0xffff_ffd8_0000_0000_u64, 0xffff_ffc7_0000_0000_u64),
            (0xffff_af80_0000_0000, 0xffff_8d80_0000_0000),
            (0xff60_0000_0000_0000, 0xff1c_0000_0000_0000),
        ] {
            assert_eq!(riscv.number(start + 64 * 5, &[mapped, 0]), 5, "{mapped:#x}");
            assert_eq!(riscv.number(start + 64 * 5, &[mapped, 0x8_0000]), 0x8_0005);
        }
        let address = array(Start::BelowAddress);
        let variables = [0xffff_ffd8_0000_0000, 0x8000_0000];
        assert_eq!(address.number(0xffff_ffc7_0000_0040, &variables), 0x8_0001);
    }
}
