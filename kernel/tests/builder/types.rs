//! Builds type information: each call adds a type and returns its number.

/// What is in a `.BTF` section.
pub struct Types {
    strings: Vec<u8>,
    types: Vec<u32>,
    count: u32,
}

pub const SIGNED: u32 = 1;
pub const BOOL: u32 = 4;

/// A member: its name, type, and first bit; of a bit field its width too.
pub type Member<'a> = (&'a str, u32, u32, u32);

impl Default for Types {
    fn default() -> Self {
        Self { strings: vec![0], types: Vec::new(), count: 0 }
    }
}

impl Types {
    fn string(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let entry = [b"\0", text.as_bytes(), b"\0"].concat();
        if let Some(at) = self.strings.windows(entry.len()).position(|window| window == entry) {
            return at as u32 + 1;
        }
        self.strings.extend(&entry[1..]);
        (self.strings.len() - text.len() - 1) as u32
    }

    /// Kind, number of members, flag; size or type; all that follows.
    pub fn raw(&mut self, name: &str, kind: (u32, usize, bool), size: u32, rest: &[u32]) -> u32 {
        let (number, members, flag) = kind;
        let name = self.string(name);
        self.types.extend([name, u32::from(flag) << 31 | number << 24 | members as u32, size]);
        self.types.extend(rest);
        self.count += 1;
        self.count
    }

    pub fn int(&mut self, name: &str, bytes: u32, encoding: u32) -> u32 {
        self.raw(name, (1, 0, false), bytes, &[encoding << 24 | (bytes % 32) << 3])
    }

    pub fn pointer(&mut self, to: u32) -> u32 {
        self.raw("", (2, 0, false), to, &[])
    }

    pub fn array(&mut self, element: u32, count: u32) -> u32 {
        self.raw("", (3, 0, false), 0, &[element, element, count])
    }

    pub fn strukt(&mut self, name: &str, size: u32, members: &[Member<'_>]) -> u32 {
        self.compound(name, 4, size, members)
    }

    pub fn union(&mut self, name: &str, size: u32, members: &[Member<'_>]) -> u32 {
        self.compound(name, 5, size, members)
    }

    fn compound(&mut self, name: &str, kind: u32, size: u32, members: &[Member<'_>]) -> u32 {
        let flag = members.iter().any(|member| member.3 > 0);
        let mut rest = Vec::new();
        for &(name, number, bits, width) in members {
            rest.extend([self.string(name), number, width << 24 | bits]);
        }
        self.raw(name, (kind, members.len(), flag), size, &rest)
    }

    pub fn enumeration(&mut self, name: &str, bytes: u32, names: &[(&str, i32)]) -> u32 {
        let mut rest = Vec::new();
        for &(name, value) in names {
            rest.extend([self.string(name), value as u32]);
        }
        let signed = names.iter().any(|&(_, value)| value < 0);
        self.raw(name, (6, names.len(), signed), bytes, &rest)
    }

    pub fn enumeration64(&mut self, name: &str, signed: bool, names: &[(&str, u64)]) -> u32 {
        let mut rest = Vec::new();
        for &(name, value) in names {
            rest.extend([self.string(name), value as u32, (value >> 32) as u32]);
        }
        self.raw(name, (19, names.len(), signed), 8, &rest)
    }

    pub fn forward(&mut self, name: &str) -> u32 {
        self.raw(name, (7, 0, false), 0, &[])
    }

    pub fn typedef(&mut self, name: &str, of: u32) -> u32 {
        self.raw(name, (8, 0, false), of, &[])
    }

    pub fn constant(&mut self, of: u32) -> u32 {
        self.raw("", (10, 0, false), of, &[])
    }

    pub fn tag(&mut self, name: &str, of: u32) -> u32 {
        self.raw(name, (18, 0, false), of, &[])
    }

    pub fn function(&mut self, name: &str, result: u32, parameters: &[(&str, u32)]) -> u32 {
        let mut rest = Vec::new();
        for &(name, number) in parameters {
            rest.extend([self.string(name), number]);
        }
        let number = self.raw("", (13, parameters.len(), false), result, &rest);
        self.raw(name, (12, 0, false), number, &[])
    }

    /// As pahole marks what BPF may call.
    pub fn kfunc(&mut self, function: u32) -> u32 {
        self.raw("bpf_kfunc", (17, 0, false), function, &[u32::MAX])
    }

    pub fn finish(&self) -> Vec<u8> {
        let types: Vec<u8> = self.types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        let (len, strings) = (types.len() as u32, self.strings.len() as u32);
        for field in [24, 0, len, len, strings] {
            bytes.extend(field.to_le_bytes());
        }
        [bytes, types, self.strings.clone()].concat()
    }
}

/// What kernels made in memory have: a task of all kinds of members, and functions that take
/// and return all kinds of types.
pub fn btf() -> Vec<u8> {
    let mut types = Types::default();
    let int = types.int("int", 4, SIGNED);
    let comm = types.array(int, 4);
    let unnamed = types.strukt("", 20, &[("b", int, 0, 0), ("comm", comm, 32, 0)]);
    let either = types.union("", 20, &[("a", int, 0, 0), ("", unnamed, 0, 0)]);
    let members = [("x", int, 0, 0), ("y", int, 32, 3), ("z", int, 41, 5)];
    let inner = types.strukt("inner", 8, &members);
    let inner_t = types.typedef("inner_t", inner);
    let field = types.constant(inner_t);
    let members = [("pid", int, 0, 0), ("", either, 32, 0), ("in", field, 192, 0)];
    let task = types.strukt("task_struct", 32, &members);

    let letter = types.int("char", 1, 0);
    let byte = types.int("unsigned char", 1, 0);
    let wide = types.int("__int128", 16, SIGNED);
    let truth = types.int("_Bool", 1, BOOL);
    let constant = types.constant(letter);
    let text = types.pointer(constant);
    let tagged = types.tag("user", constant);
    let user = types.pointer(tagged);
    let mode = types.enumeration("mode", 4, &[("NONE", -1), ("READ", 0), ("WRITE", 1)]);
    let flags = types.enumeration64("flags", false, &[("HIGH", 1 << 40)]);
    let (task_at, unknown) = (types.pointer(task), types.forward("unknown"));
    let unknown_at = types.pointer(unknown);
    let array = types.array(byte, 40);
    let members = [
        ("task", task_at, 0, 0),
        ("name", text, 64, 0),
        ("list", array, 128, 0),
        ("unknown", unknown_at, 448, 0),
    ];
    let big = types.strukt("big", 64, &members);
    let uid = types.strukt("uid", 4, &[("val", int, 0, 0)]);
    let all = [
        ("task", task_at),
        ("name", text),
        ("in", field),
        ("wide", wide),
        ("mode", mode),
        ("", truth),
        ("uid", uid),
        ("", 0),
    ];
    types.function("vfs_read", int, &all);
    let all = [("big", big), ("user", user), ("flags", flags), ("byte", byte), ("c", letter)];
    types.function("vfs_write", big, &all);
    types.function("function_1", 0, &[("a", int)]);
    types.function("function_1", 0, &[("a", text)]);
    types.function("function_2", 0, &[("a", int)]);
    types.function("function_2", 0, &[("a", int)]);
    types.function("dup_static", 0, &[("a", int)]);
    types.finish()
}

/// Paths that lead everywhere in [`btf`], for what is damaged; some are wrong.
pub const PATHS: [&str; 24] = [
    "task",
    "task->pid",
    "task->comm",
    "task->comm[3]",
    "task->comm:5",
    "task->in.y",
    "task->in.z",
    "task->in",
    "task[2].b",
    "name:9",
    "in.x",
    "in.y",
    "in",
    "wide",
    "mode",
    "arg6",
    "uid",
    "big",
    "big.task->in.z",
    "big.name",
    "big.list:40",
    "big.unknown->x",
    "$ret",
    "$ret->task->nothing",
];
