//! What a guest finds in the tree, by another implementation of the format.

use fdt::Fdt;
use fdt::node::FdtNode;

use super::*;

const SLOT: VirtioSlot = VirtioSlot { base: layout::VIRTIO_MMIO, irq: layout::VIRTIO_IRQ };

fn blob(cpus: u32, wiring: Wiring, initrd: Option<(u64, u64)>) -> Vec<u8> {
    let isa = Isa {
        extensions: vec!["i", "m", "a", "c", "zicboz", "sstc"],
        satp_mode: 9,
        cbom_block: None,
        cboz_block: Some(64),
    };
    tree(&Description {
        cpus,
        ram: &[(layout::RAM, 512 << 20)],
        annex: Some((layout::ANNEX_BASE, 16 << 20)),
        cmdline: "console=ttyS0 quiet",
        initrd,
        timebase: 10_000_000,
        isa: &isa,
        wiring,
        virtio: &[SLOT],
        seed: &[7; 64],
    })
    .unwrap()
}

fn words(node: FdtNode<'_, '_>, name: &str) -> Vec<u32> {
    let value = node.property(name).unwrap_or_else(|| panic!("no {name} in {}", node.name)).value;
    value.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect()
}

fn text<'a>(node: FdtNode<'_, 'a>, name: &str) -> &'a str {
    node.property(name).unwrap().as_str().unwrap()
}

/// Guest-physical ranges of everything that has some.
fn ranges(fdt: &Fdt<'_>) -> Vec<(usize, usize)> {
    let nodes = fdt.all_nodes().filter(|node| node.name != "interrupt-controller");
    let regions = nodes.filter(|node| !node.name.starts_with("cpu")).filter_map(|n| n.reg());
    let mut all: Vec<_> =
        regions.flatten().map(|r| (r.starting_address as usize, r.size.unwrap())).collect();
    all.sort_unstable();
    all
}

#[test]
fn the_kernel_finds_its_beginnings() {
    let blob = blob(2, Wiring::Aia { ids: 255 }, Some((0x9000_0000, 0x1234)));
    assert!(blob.len() < 64 << 10);
    let fdt = Fdt::new(&blob).unwrap();
    assert_eq!(fdt.chosen().bootargs(), Some("console=ttyS0 quiet"));
    let chosen = fdt.find_node("/chosen").unwrap();
    assert_eq!(words(chosen, "linux,initrd-start"), [0, 0x9000_0000]);
    assert_eq!(words(chosen, "linux,initrd-end"), [0, 0x9000_1234]);
    assert_eq!(chosen.property("rng-seed").unwrap().value, [7; 64]);
    let memory: Vec<_> = fdt.memory().regions().collect();
    assert_eq!(
        (memory.len(), memory[0].starting_address as u64, memory[0].size),
        (1, layout::RAM, Some(512 << 20))
    );
    // Aliases decide which port is ttyS0, and ttyS1 is the agent's.
    let aliases = fdt.find_node("/aliases").unwrap();
    for (alias, base) in [("serial0", layout::UART0), ("serial1", layout::UART1)] {
        let port = fdt.find_node(text(aliases, alias)).unwrap();
        assert_eq!(port.reg().unwrap().next().unwrap().starting_address as u64, base);
        assert_eq!(text(port, "compatible"), "ns16550a");
    }
    // By what the driver of pvpanic goes.
    let pvpanic = fdt.find_node("/soc/pvpanic@10002000").unwrap();
    assert_eq!(pvpanic.reg().unwrap().next().unwrap().size, Some(1));
    assert_eq!(text(pvpanic, "compatible"), "qemu,pvpanic-mmio");
}

#[test]
fn no_initrd_no_properties() {
    let blob = blob(1, Wiring::Plic, None);
    let fdt = Fdt::new(&blob).unwrap();
    let chosen = fdt.find_node("/chosen").unwrap();
    assert!(chosen.property("linux,initrd-start").is_none());
    assert!(chosen.property("linux,initrd-end").is_none());
}

#[test]
fn every_hart_is_described() {
    let blob = blob(3, Wiring::Plic, None);
    let fdt = Fdt::new(&blob).unwrap();
    assert_eq!(fdt.cpus().count(), 3);
    for hart in 0..3 {
        let cpu = fdt.find_node(&format!("/cpus/cpu@{hart}")).unwrap();
        assert_eq!(words(cpu, "reg"), [hart]);
        assert_eq!(text(cpu, "riscv,isa"), "rv64imac_zicboz_sstc");
        assert_eq!(text(cpu, "mmu-type"), "riscv,sv48");
        let names = cpu.property("riscv,isa-extensions").unwrap().value;
        assert_eq!(names, b"i\0m\0a\0c\0zicboz\0sstc\0");
        assert_eq!(words(cpu, "riscv,cboz-block-size"), [64]);
        assert!(cpu.property("riscv,cbom-block-size").is_none());
    }
    assert_eq!(words(fdt.find_node("/cpus").unwrap(), "timebase-frequency"), [10_000_000]);
}

#[test]
fn interrupts_lead_to_every_hart() {
    for (wiring, controller) in [
        (Wiring::Aia { ids: 255 }, "/soc/imsics@28000000"),
        (Wiring::Plic, "/soc/interrupt-controller@c000000"),
    ] {
        let blob = blob(2, wiring, None);
        let fdt = Fdt::new(&blob).unwrap();
        let harts: Vec<u32> = (0..2)
            .map(|hart| {
                let path = format!("/cpus/cpu@{hart}/interrupt-controller");
                words(fdt.find_node(&path).unwrap(), "phandle")[0]
            })
            .collect();
        let controller = fdt.find_node(controller).unwrap();
        let external = [harts[0], 9, harts[1], 9];
        assert_eq!(words(controller, "interrupts-extended"), external);
        let virtio = fdt.find_node("/soc/virtio_mmio@10010000").unwrap();
        let parent = fdt.find_phandle(words(virtio, "interrupt-parent")[0]).unwrap();
        match wiring {
            Wiring::Aia { ids } => {
                assert_eq!(words(controller, "riscv,num-ids"), [ids]);
                assert_eq!(text(parent, "compatible"), "riscv,aplic");
                let msi = fdt.find_phandle(words(parent, "msi-parent")[0]).unwrap();
                assert_eq!(msi.name, controller.name);
                assert_eq!(words(virtio, "interrupts"), [layout::VIRTIO_IRQ, 4]);
            }
            Wiring::Plic => {
                assert_eq!(parent.name, controller.name);
                assert_eq!(words(virtio, "interrupts"), [layout::VIRTIO_IRQ]);
            }
        }
    }
}

#[test]
fn nothing_overlaps_with_any_number_of_harts() {
    for (cpus, wiring) in [(1, Wiring::Plic), (255, Wiring::Plic), (255, Wiring::Aia { ids: 63 })] {
        let blob = blob(cpus, wiring, None);
        // Half of what a kernel maps for it.
        assert!(blob.len() < 1 << 20);
        let ranges = ranges(&Fdt::new(&blob).unwrap());
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
    }
}
