//! Free variables of a template: those that it reads without having set them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::ast::{Arguments, Expr, ExprKind, Macro, Stmt, Target, Template};

/// Traversal of a template that collects its free variables.
struct FreeVariableFinder<'t> {
    template: &'t Template,
    free: HashSet<Arc<str>>,
    /// Names that are set at the current position, in order of assignment.
    bound: Vec<Arc<str>>,
    /// Number of times that each name occurs in them.
    bound_counts: HashMap<Arc<str>, usize>,
}

/// Returns the variables that `template` expects from its context.
pub(in crate::text) fn free_variables(template: &Template) -> HashSet<Arc<str>> {
    let mut finder = FreeVariableFinder {
        template,
        free: HashSet::new(),
        bound: Vec::new(),
        bound_counts: HashMap::new(),
    };
    finder.statements(&template.body);
    finder.free
}

impl FreeVariableFinder<'_> {
    /// Visits a part that may be skipped or has a scope of its own, and forgets the names that it sets.
    fn in_own_scope(&mut self, go: impl FnOnce(&mut Self)) {
        let before = self.bound.len();
        go(self);
        for name in self.bound.drain(before..) {
            if let Some(count) = self.bound_counts.get_mut(&name) {
                *count = count.saturating_sub(1);
            }
        }
    }

    fn bind(&mut self, name: Arc<str>) {
        *self.bound_counts.entry(name.clone()).or_default() += 1;
        self.bound.push(name);
    }

    fn target(&mut self, target: &Target) {
        match target {
            Target::Name(name) => self.bind(name.clone()),
            Target::Tuple(targets) => targets.iter().for_each(|target| self.target(target)),
            Target::Attribute(name, _) => self.name(name),
        }
    }

    fn name(&mut self, name: &Arc<str>) {
        if self.bound_counts.get(name).is_none_or(|count| *count == 0) {
            self.free.insert(name.clone());
        }
    }

    fn statements(&mut self, body: &[Stmt]) {
        body.iter().for_each(|statement| self.statement(statement));
    }

    fn statement(&mut self, statement: &Stmt) {
        match statement {
            Stmt::Text(_) | Stmt::Break | Stmt::Continue | Stmt::Unavailable(..) => (),
            Stmt::Output(expr) => self.expr(expr),
            Stmt::If(branches, otherwise) => {
                for (test, body) in branches {
                    self.expr(test);
                    self.in_own_scope(|finder| finder.statements(body));
                }
                self.in_own_scope(|finder| finder.statements(otherwise));
            }
            Stmt::For(statement) => {
                self.expr(&statement.iter);
                self.in_own_scope(|finder| {
                    finder.target(&statement.target);
                    finder.bind("loop".into());
                    statement.test.iter().for_each(|test| finder.expr(test));
                    finder.statements(&statement.body);
                });
                self.in_own_scope(|finder| finder.statements(&statement.otherwise));
            }
            Stmt::Set(target, expr) => {
                self.expr(expr);
                self.target(target);
            }
            Stmt::SetBlock(target, filter, body) => {
                self.in_own_scope(|finder| finder.statements(body));
                filter.iter().for_each(|filter| self.expr(filter));
                self.target(target);
            }
            Stmt::Macro(number) => {
                if let Some(definition) = self.template.macros.get(*number) {
                    self.bind(definition.name.clone());
                    self.definition(definition);
                }
            }
            Stmt::CallBlock(call, number) => {
                self.expr(call);
                if let Some(definition) = self.template.macros.get(*number) {
                    self.definition(definition);
                }
            }
            Stmt::Filter(filter, body) => {
                self.in_own_scope(|finder| finder.statements(body));
                self.expr(filter);
            }
            Stmt::With(values, body) => {
                values.iter().for_each(|(_, value)| self.expr(value));
                self.in_own_scope(|finder| {
                    values.iter().for_each(|(target, _)| finder.target(target));
                    finder.statements(body);
                });
            }
            Stmt::Block(body) | Stmt::Generation(body) => self.in_own_scope(|finder| finder.statements(body)),
        }
    }

    fn definition(&mut self, definition: &Macro) {
        for (_, default) in &definition.parameters {
            default.iter().for_each(|default| self.expr(default));
        }
        self.in_own_scope(|finder| {
            for name in ["caller", "varargs", "kwargs"] {
                finder.bind(name.into());
            }
            definition.parameters.iter().for_each(|(name, _)| finder.bind(name.clone()));
            finder.statements(&definition.body);
        });
    }

    fn arguments(&mut self, arguments: &Arguments) {
        arguments.positional.iter().for_each(|argument| self.expr(argument));
        arguments.named.iter().for_each(|(_, argument)| self.expr(argument));
        arguments.star.iter().chain(&arguments.double_star).for_each(|argument| self.expr(argument));
    }

    fn expr(&mut self, expr: &Expr) {
        match &expr.kind {
            ExprKind::None
            | ExprKind::Bool(_)
            | ExprKind::Int(_)
            | ExprKind::Float(_)
            | ExprKind::Text(_) => (),
            ExprKind::Name(name) => self.name(name),
            ExprKind::Tuple(items) | ExprKind::List(items) | ExprKind::Concat(items) => {
                items.iter().for_each(|item| self.expr(item));
            }
            ExprKind::Map(entries) => entries.iter().for_each(|(key, value)| {
                self.expr(key);
                self.expr(value);
            }),
            ExprKind::Condition { test, then, otherwise } => {
                self.expr(test);
                self.expr(then);
                otherwise.iter().for_each(|otherwise| self.expr(otherwise));
            }
            ExprKind::And(left, right)
            | ExprKind::Or(left, right)
            | ExprKind::Binary(_, left, right)
            | ExprKind::Item(left, right) => {
                self.expr(left);
                self.expr(right);
            }
            ExprKind::Not(inner)
            | ExprKind::Negative(inner)
            | ExprKind::Positive(inner)
            | ExprKind::Attribute(inner, _) => self.expr(inner),
            ExprKind::Compare(first, comparisons) => {
                self.expr(first);
                comparisons.iter().for_each(|(_, operand)| self.expr(operand));
            }
            ExprKind::Slice(owner, parts) => {
                self.expr(owner);
                parts.iter().flatten().for_each(|part| self.expr(part));
            }
            ExprKind::Call(callee, arguments) => {
                self.expr(callee);
                self.arguments(arguments);
            }
            ExprKind::Filter(value, _, arguments) => {
                value.iter().for_each(|value| self.expr(value));
                self.arguments(arguments);
            }
            ExprKind::Test(value, _, arguments) => {
                self.expr(value);
                self.arguments(arguments);
            }
        }
    }
}
