//! The syntax tree of a template.

use std::sync::Arc;

/// Expression and the line where it begins.
#[derive(Debug)]
pub(super) struct Expr {
    pub(super) line: u32,
    pub(super) kind: ExprKind,
}

#[derive(Debug)]
pub(super) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    /// `then if test else otherwise`.
    Condition {
        test: Box<Expr>,
        then: Box<Expr>,
        otherwise: Option<Box<Expr>>,
    },
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Not(Box<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Arguments),
    /// Filter; its value is absent in `{% filter %}` and `{% set x | f %}`, which apply it to a body.
    Filter(Option<Box<Expr>>, Arc<str>, Arguments),
    Test(Box<Expr>, Arc<str>, Arguments),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

/// Argument expressions of a call.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
    pub(super) star: Option<Box<Expr>>,
    pub(super) double_star: Option<Box<Expr>>,
}

/// Target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    Tuple(Vec<Target>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
}

impl Target {
    /// Reports if an assignment to this target sets the variable `name`.
    pub(super) fn sets(&self, name: &str) -> bool {
        match self {
            Self::Name(own) => **own == *name,
            Self::Tuple(targets) => targets.iter().any(|target| target.sets(name)),
            Self::Attribute(..) => false,
        }
    }
}

#[derive(Debug)]
pub(super) enum Stmt {
    Text(String),
    Output(Expr),
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    For(Box<ForLoop>),
    Set(Target, Expr),
    /// `{% set x | filter %}..{% endset %}`.
    SetBlock(Target, Option<Expr>, Vec<Stmt>),
    /// Definition of a macro, by its index in [`Template::macros`].
    Macro(usize),
    /// Call and the index of its body in [`Template::macros`].
    CallBlock(Expr, usize),
    Filter(Expr, Vec<Stmt>),
    With(Vec<(Target, Expr)>, Vec<Stmt>),
    /// `{% block %}`, which sees only variables of the template's outermost scope.
    Block(Vec<Stmt>),
    /// `{% generation %}`, with a scope of its own.
    Generation(Vec<Stmt>),
    Break,
    Continue,
    /// Statement that needs other templates, which a chat template does not have; its tag and line.
    Unavailable(&'static str, u32),
}

#[derive(Debug)]
pub(super) struct ForLoop {
    pub(super) target: Target,
    pub(super) iter: Expr,
    pub(super) test: Option<Expr>,
    pub(super) recursive: bool,
    /// Reports if the body may read `loop`.
    pub(super) reads_loop: bool,
    pub(super) body: Vec<Stmt>,
    pub(super) otherwise: Vec<Stmt>,
}

/// Name of a parameter and its default.
pub(super) type Parameter = (Arc<str>, Option<Expr>);

/// Macro, or body of a call block.
#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Vec<Parameter>,
    pub(super) body: Vec<Stmt>,
    /// Reports if the body reads `varargs`, and likewise for the next two.
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
    pub(super) caller: bool,
}

/// Parsed template.
#[derive(Debug)]
pub(in crate::text) struct Template {
    pub(super) body: Vec<Stmt>,
    pub(super) macros: Vec<Macro>,
}
