// A module of a guest that is a direct caller of a function of the kernel, and patches another one (livepatch) where the
// kernel can do that.
// Without the kernel's headers, which are not had for every kernel of the cache: what they would tell (sizes and
// offsets in bytes, NAME_MEMBER) comes from the kernel's own type information.

#define SECTION(name) __attribute__((section(name), used))
#define INFO(id, text) static const char id[] SECTION(".modinfo") = text
#define AT(type, place, offset) (*(type *)((char *)(place) + (offset)))

INFO(license, "license=GPL");
INFO(versions, "vermagic=" VERMAGIC);
INFO(own_name, "name=vmtrace_own");

int _printk(const char *format, ...);
unsigned long lcm(unsigned long a, unsigned long b);
int ftrace_set_filter_ip(void *ops, unsigned long ip, int remove, int reset);
int REGISTER(void *ops, unsigned long address);
int UNREGISTER(void *ops, unsigned long address, _Bool free_filters);

int init_module(void);
void cleanup_module(void);
extern char __this_module[];

#ifdef KLP_PATCH_SIZE
INFO(patches, "livepatch=Y");

int klp_enable_patch(void *patch);
void seq_printf(void *file, const char *format, ...);

static int patched_show(void *file, void *value)
{
	seq_printf(file, "this has been live patched\n");
	return 0;
}

// Each list ends with a zero.
static char functions[2 * KLP_FUNC_SIZE] __attribute__((aligned(64)));
static char objects[2 * KLP_OBJECT_SIZE] __attribute__((aligned(64)));
static char patch[KLP_PATCH_SIZE] __attribute__((aligned(64)));

static int enable_patch(void)
{
	AT(const char *, functions, KLP_FUNC_OLD_NAME) = "cmdline_proc_show";
	AT(void *, functions, KLP_FUNC_NEW_FUNC) = patched_show;
	AT(void *, objects, KLP_OBJECT_FUNCS) = functions;
	AT(void *, patch, KLP_PATCH_MOD) = __this_module;
	AT(void *, patch, KLP_PATCH_OBJS) = objects;
	return klp_enable_patch(patch);
}
#else
static int enable_patch(void)
{
	return 0;
}
#endif

static char direct[FTRACE_OPS_SIZE] __attribute__((aligned(64)));
static unsigned long hits;
static volatile unsigned long result;

void own_hit(void);
void own_hit(void)
{
	hits++;
}

void own_direct(void);
#ifdef __x86_64__
asm(".text\n.type own_direct, @function\nown_direct:\n"
    "	endbr64\n	pushq %rbp\n	movq %rsp, %rbp\n	pushq %rdi\n	pushq %rsi\n"
    "	call own_hit\n"
    "	popq %rsi\n	popq %rdi\n	leave\n	ret\n"
    ".size own_direct, . - own_direct\n");
#else
// The call of a site leaves in t0 where it goes on, and ra as it was (arch/riscv/kernel/mcount-dyn.S).
asm(".text\n.type own_direct, @function\nown_direct:\n"
    "	addi sp, sp, -32\n	sd a0, 0(sp)\n	sd a1, 8(sp)\n	sd t0, 16(sp)\n	sd ra, 24(sp)\n"
    "	call own_hit\n"
    "	ld a0, 0(sp)\n	ld a1, 8(sp)\n	ld t0, 16(sp)\n	ld ra, 24(sp)\n	addi sp, sp, 32\n	jr t0\n"
    ".size own_direct, . - own_direct\n");
// What the kernel's linker script makes (arch/riscv/include/asm/module.lds.h).
asm(".section .plt, \"ax\"\n.byte 0\n.section .got, \"aw\"\n.byte 0\n.section .got.plt, \"aw\"\n.byte 0\n");
#endif

static void calls(void)
{
	for (int i = 0; i < CALLS; i++)
		result = lcm(1000 + i, 7);
}

int init_module(void)
{
	int failed;

	calls();
	failed = ftrace_set_filter_ip(direct, (unsigned long)lcm, 0, 0);
	failed = failed ?: REGISTER(direct, (unsigned long)own_direct);
	calls();
	failed = failed ?: UNREGISTER(direct, (unsigned long)own_direct, 0);
	_printk("vmtrace_own: direct calls %lu, error %d\n", hits, failed);
	calls();
	return failed ?: enable_patch();
}

void cleanup_module(void)
{
}

struct own {
	char before[MODULE_NAME];
	char name[MODULE_INIT - MODULE_NAME];
	int (*init)(void);
	char between[MODULE_EXIT - MODULE_INIT - 8];
	void (*exit)(void);
	char after[MODULE_SIZE - MODULE_EXIT - 8];
} __attribute__((packed));

struct own own SECTION(".gnu.linkonce.this_module") __attribute__((aligned(64))) = {
	.name = "vmtrace_own", .init = init_module, .exit = cleanup_module,
};
asm(".globl __this_module\n.set __this_module, own\n");
