//! Parameters and results of functions: where they are and how they are shown, from the kernel's
//! own type information.
//!
//! [`Kernel::prototype`] describes all parameters of a function and its result, [`Kernel::path`]
//! one value that a user asks for, and [`Kernel::raw_arguments`] the argument registers of a
//! function without type information.

use std::sync::Mutex;

use super::btf::{Btf, Functions, Kind, Named};
use super::near::Near;
use super::{Arch, Kernel, KernelError};

mod convention;
mod error;
mod path;
mod resolve;
mod shape;
mod spec;
mod types;

pub use error::{PathError, PathProblem, SpecError};
pub use shape::{EnumNames, Shape};
pub use spec::ArgumentSpec;

use convention::{Convention, Place};
use types::{Enums, Types};

/// One value that a record has, and how to show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The parameter's name, `arg1` if it has none; of a path its label or the path itself; of
    /// the result `ret`.
    pub name: String,
    /// Where it comes from.
    pub fetch: Fetch,
    /// How to show what was fetched.
    pub shape: Shape,
}

/// Where a value comes from.
///
/// Words are the integer argument words of the calling convention by number. x86-64: 0 to 5 are
/// rdi, rsi, rdx, rcx, r8, r9, and from 6 on the 8-byte stack slots above the return address.
/// riscv64: 0 to 7 are a0 to a7, and from 8 on the stack slots from sp on. All as they are at the
/// function's entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// One word.
    Argument(u8),
    /// A struct or an integer of 9 to 16 bytes, passed by value in these two words.
    Words(Vec<u8>),
    /// The register that the result is in: rax, a0.
    Result,
    /// What pointers lead to. From the word at `from` on, each hop is `v = *(u64 *)(v + hop)`,
    /// and then `last` is read.
    Memory {
        /// The first pointer.
        from: Source,
        /// Distances in bytes, at most [`Fetch::MOST_HOPS`].
        hops: Vec<i32>,
        /// What is read at the end.
        last: Last,
    },
}

/// Where pointers start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An argument word, as in [`Fetch::Argument`].
    Argument(u8),
    /// The result's register.
    Result,
}

/// What is read at the end of a chain of pointers; offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Last {
    /// A word of 1, 2, 4 or 8 bytes, which need not be aligned.
    Word {
        /// From the last pointer.
        offset: i32,
        /// In bytes.
        size: u8,
    },
    /// Text up to a NUL, and `max` bytes at most, which it may fill without a NUL.
    Text {
        /// From the last pointer.
        offset: i32,
        /// 1 to [`Last::MOST_TEXT`].
        max: u8,
    },
    /// Bytes as they are.
    Bytes {
        /// From the last pointer.
        offset: i32,
        /// 1 to [`Last::MOST_BYTES`].
        size: u8,
    },
}

impl Fetch {
    /// How many pointers a path follows to the last one.
    pub const MOST_HOPS: usize = 16;

    /// Whether it is there when the function returns, and not when it is entered.
    pub fn at_return(&self) -> bool {
        matches!(self, Self::Result | Self::Memory { from: Source::Result, .. })
    }
}

impl Last {
    /// The longest text of a path.
    pub const MOST_TEXT: u8 = 128;
    /// The most bytes of a struct or an array as a whole.
    pub const MOST_BYTES: u8 = 64;
    /// The longest text of [`Kernel::prototype`].
    pub const PARAMETER_TEXT: u8 = 32;
}

/// The parameters of a function and what it returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prototype {
    /// In the order of the declaration, variadic ones not among them.
    pub parameters: Vec<Value>,
    /// Names of parameters that are in no word: structs of more than 16 bytes on the stack of
    /// x86-64, empty structs. Members of the former have paths.
    pub left_out: Vec<String>,
    /// None if no register has it: `void`, or a struct that is written into the caller's memory.
    pub result: Option<Value>,
}

/// Why a function's parameters are not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPrototype {
    /// There is no type information, or it is damaged.
    #[error("the kernel has no usable type information (CONFIG_DEBUG_INFO_BTF)")]
    NoTypes,
    /// No such site, or a function without a name.
    #[error("the function has no name")]
    NoName,
    /// The compiler made a copy of the function with other parameters: `.isra.0`, `.constprop.0`.
    #[error("the compiler has changed its parameters")]
    Changed,
    /// The type information does not describe it.
    #[error("the kernel's type information does not describe it")]
    Unknown,
    /// Several functions of its name have different parameters, or may have.
    #[error("several functions have its name, and the type information may be that of another")]
    Ambiguous,
    /// Types that contradict each other.
    #[error("the type information of its parameters is damaged")]
    Damaged,
}

/// What is looked up once for a kernel.
#[derive(Debug)]
pub(super) struct Arguments {
    functions: Functions,
    enums: Mutex<Enums>,
}

/// The types of a module, with those of the kernel that it was built for.
#[derive(Debug)]
pub struct ModuleTypes {
    btf: Btf,
    /// Of functions of its own.
    arguments: Arguments,
}

impl ModuleTypes {
    fn scope(&self) -> Scope<'_> {
        Scope { btf: &self.btf, arguments: &self.arguments, module: true }
    }
}

/// Where functions are looked up.
#[derive(Clone, Copy)]
struct Scope<'a> {
    btf: &'a Btf,
    arguments: &'a Arguments,
    /// Of a module, of which no table has all names.
    module: bool,
}

/// A function's parameters as types.
struct Signature<'a> {
    function: String,
    parameters: Vec<Parameter<'a>>,
    result: u32,
    returned: Place,
}

struct Parameter<'a> {
    /// Empty if it has none.
    name: &'a str,
    number: u32,
    place: Place,
}

impl Parameter<'_> {
    fn name(&self, position: usize) -> String {
        match self.name {
            "" => format!("arg{}", position + 1),
            name => name.to_owned(),
        }
    }
}

impl Kernel {
    /// The parameters and the result of the function at a site, by its index in
    /// [`Kernel::sites`]. None if they are not known: [`Kernel::no_prototype`] says why, and
    /// [`Kernel::raw_arguments`] is what can be had then.
    pub fn prototype(&self, site: usize) -> Option<Prototype> {
        self.known_prototype(site).ok()
    }

    /// The same of a function by its name, whether it has a site or not; `module` has the types of
    /// the module that it is in, if it is in one.
    pub(super) fn prototype_of_name(
        &self,
        name: &str,
        module: Option<&ModuleTypes>,
    ) -> Result<Prototype, NoPrototype> {
        let names = [name].into_iter();
        let Some(module) = module else {
            let (types, signature) = self.signature_of(names)?;
            return Ok(types.prototype(&signature));
        };
        self.module_prototype(module, names)
    }

    /// The parameters and the result of a function of a module, by its names and the module's types.
    ///
    /// # Errors
    /// Why they are not known.
    pub fn module_prototype<'n>(
        &self,
        types: &ModuleTypes,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<Prototype, NoPrototype> {
        let (types, signature) = self.signature_in(types.scope(), names)?;
        Ok(types.prototype(&signature))
    }

    /// The types of a module, by its `.BTF` section as it is in the guest's memory.
    ///
    /// # Errors
    /// When the kernel has none itself, or these are damaged.
    pub fn module_types(&self, split: &[u8]) -> Result<ModuleTypes, KernelError> {
        let own = self.btf()?;
        let btf = own.with_split(split)?;
        let functions = Functions::new(&btf, own.len());
        Ok(ModuleTypes { btf, arguments: Arguments { functions, enums: Mutex::default() } })
    }

    /// Why the function at a site has no prototype; none if it has one.
    pub fn no_prototype(&self, site: usize) -> Option<NoPrototype> {
        self.signature(site).err()
    }

    /// The prototype of the function at a site.
    ///
    /// # Errors
    /// Why it has none.
    pub fn known_prototype(&self, site: usize) -> Result<Prototype, NoPrototype> {
        let (types, signature) = self.signature(site)?;
        Ok(types.prototype(&signature))
    }

    /// The registers that pass parameters, by their own names: for functions whose parameters
    /// are not known.
    pub fn raw_arguments(&self) -> Vec<Value> {
        let registers = (0..).zip(convention::registers(self.arch()));
        let value = |(word, name): (u8, &&str)| Value {
            name: (*name).to_owned(),
            fetch: Fetch::Argument(word),
            shape: Shape::Raw { bytes: 8 },
        };
        registers.map(value).collect()
    }

    fn signature(&self, site: usize) -> Result<(Types<'_>, Signature<'_>), NoPrototype> {
        let entry = self.sites().get(site).ok_or(NoPrototype::NoName)?.entry;
        let primary = self.symbols().primary_at(entry).ok_or(NoPrototype::NoName)?;
        let others = self.symbols().names_at(entry).filter(|name| *name != primary);
        self.signature_of([primary].into_iter().chain(others))
    }

    /// Of the first of these names that is known.
    fn signature_of<'a, 'n>(
        &'a self,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<(Types<'a>, Signature<'a>), NoPrototype> {
        let btf = self.btf().map_err(|_| NoPrototype::NoTypes)?;
        let arguments = self.arguments.get_or_init(|| Arguments {
            functions: Functions::new(btf, 0),
            enums: Mutex::default(),
        });
        self.signature_in(Scope { btf, arguments, module: false }, names)
    }

    fn signature_in<'a, 'n>(
        &self,
        scope: Scope<'a>,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<(Types<'a>, Signature<'a>), NoPrototype> {
        let Scope { btf, arguments, module } = scope;
        // The first that tells why stands for all.
        let mut why = None;
        for name in names {
            let found = match arguments.functions.find(btf, name) {
                Named::Known(number) if module || self.is_its(&arguments.functions, name) => {
                    Signature::new(btf, self.arch(), name, number).ok_or(NoPrototype::Damaged)
                }
                Named::Known(_) | Named::Ambiguous => Err(NoPrototype::Ambiguous),
                Named::Unknown if name.contains('.') => Err(NoPrototype::Changed),
                Named::Unknown => Err(NoPrototype::Unknown),
            };
            match found {
                Ok(signature) => return Ok((Types { btf, enums: &arguments.enums }, signature)),
                Err(reason) => why = why.or(Some(reason)),
            }
        }
        Err(why.unwrap_or(NoPrototype::NoName))
    }

    /// Whether what is known of a name is true for all functions that have it.
    fn is_its(&self, functions: &Functions, name: &str) -> bool {
        functions.consistent || self.symbols().addresses(name).nth(1).is_none()
    }
}

impl<'a> Signature<'a> {
    fn new(btf: &'a Btf, arch: Arch, function: &str, number: u32) -> Option<Self> {
        let (parameters, result) = btf.signature(number)?;
        let mut convention = Convention::new(btf, arch, result)?;
        let returned = convention.result(btf, result)?;
        let parameters = parameters.into_iter().map(|(name, number)| {
            Some(Parameter { name, number, place: convention.next(btf, number)? })
        });
        let parameters = parameters.collect::<Option<_>>()?;
        Some(Self { function: function.to_owned(), parameters, result, returned })
    }
}

impl Types<'_> {
    fn prototype(&self, signature: &Signature<'_>) -> Prototype {
        let mut prototype =
            Prototype { parameters: Vec::new(), left_out: Vec::new(), result: None };
        for (i, parameter) in signature.parameters.iter().enumerate() {
            let name = parameter.name(i);
            match self.value(parameter.number, parameter.place, Source::Argument) {
                Some((fetch, shape)) => prototype.parameters.push(Value { name, fetch, shape }),
                None => prototype.left_out.push(name),
            }
        }
        let result = self.value(signature.result, signature.returned, |_| Source::Result);
        prototype.result =
            result.map(|(fetch, shape)| Value { name: "ret".to_owned(), fetch, shape });
        prototype
    }

    /// A parameter or result as a whole. None if no words have it.
    fn value(
        &self,
        number: u32,
        place: Place,
        source: impl Fn(u8) -> Source,
    ) -> Option<(Fetch, Shape)> {
        let word = |word| match source(word) {
            Source::Argument(word) => Fetch::Argument(word),
            Source::Result => Fetch::Result,
        };
        let (first, count) = match place {
            Place::Words { first, count } => (first, count),
            Place::Reference(first) => return Some((word(first), Shape::Pointer)),
            Place::Nowhere => return None,
        };
        let seen = self.inner(number)?;
        if let Kind::Pointer(target) = seen.kind
            && self.is_text(target)
        {
            let last = Last::Text { offset: 0, max: Last::PARAMETER_TEXT };
            let fetch = Fetch::Memory { from: source(first), hops: Vec::new(), last };
            return Some((fetch, Shape::Text));
        }
        if let Some(shape) = self.scalar(seen) {
            return Some((word(first), shape));
        }
        let size = u8::try_from(self.btf.size_of(number)?).ok()?;
        match count {
            1 => Some((word(first), Shape::Raw { bytes: size.min(8) })),
            // The second word of a result is in another register.
            2 if source(first) == Source::Result => Some((Fetch::Result, Shape::Raw { bytes: 8 })),
            2 => {
                let words = vec![first, first.checked_add(1)?];
                Some((Fetch::Words(words), Shape::Raw { bytes: size.min(16) }))
            }
            _ => None,
        }
    }
}
