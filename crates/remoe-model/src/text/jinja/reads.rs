//! Names of variables that a template reads before it sets them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::ast::{Arguments, Expr, ExprKind, Macro, Stmt, Target, Template};

struct Reads<'t> {
    template: &'t Template,
    read: HashSet<Arc<str>>,
    /// Names that the template has set, where it stands, in their order.
    set: Vec<Arc<str>>,
    /// How often each of them is among those.
    counts: HashMap<Arc<str>, usize>,
}

/// The variables that `template` takes from outside.
pub(in crate::text) fn variables(template: &Template) -> HashSet<Arc<str>> {
    let mut reads = Reads { template, read: HashSet::new(), set: Vec::new(), counts: HashMap::new() };
    reads.statements(&template.body);
    reads.read
}

impl Reads<'_> {
    /// Goes through what may not happen, or has variables of its own.
    fn apart(&mut self, go: impl FnOnce(&mut Self)) {
        let before = self.set.len();
        go(self);
        for name in self.set.drain(before..) {
            if let Some(count) = self.counts.get_mut(&name) {
                *count = count.saturating_sub(1);
            }
        }
    }

    fn sets(&mut self, name: Arc<str>) {
        *self.counts.entry(name.clone()).or_default() += 1;
        self.set.push(name);
    }

    fn target(&mut self, target: &Target) {
        match target {
            Target::Name(name) => self.sets(name.clone()),
            Target::Tuple(targets) => targets.iter().for_each(|target| self.target(target)),
            Target::Attribute(name, _) => self.name(name),
        }
    }

    fn name(&mut self, name: &Arc<str>) {
        if self.counts.get(name).is_none_or(|count| *count == 0) {
            self.read.insert(name.clone());
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
                    self.apart(|reads| reads.statements(body));
                }
                self.apart(|reads| reads.statements(otherwise));
            }
            Stmt::For(statement) => {
                self.expr(&statement.iter);
                self.apart(|reads| {
                    reads.target(&statement.target);
                    reads.sets("loop".into());
                    statement.test.iter().for_each(|test| reads.expr(test));
                    reads.statements(&statement.body);
                });
                self.apart(|reads| reads.statements(&statement.otherwise));
            }
            Stmt::Set(target, expr) => {
                self.expr(expr);
                self.target(target);
            }
            Stmt::SetBlock(target, filter, body) => {
                self.apart(|reads| reads.statements(body));
                filter.iter().for_each(|filter| self.expr(filter));
                self.target(target);
            }
            Stmt::Macro(number) => {
                if let Some(definition) = self.template.macros.get(*number) {
                    self.sets(definition.name.clone());
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
                self.apart(|reads| reads.statements(body));
                self.expr(filter);
            }
            Stmt::With(values, body) => {
                values.iter().for_each(|(_, value)| self.expr(value));
                self.apart(|reads| {
                    values.iter().for_each(|(target, _)| reads.target(target));
                    reads.statements(body);
                });
            }
            Stmt::Block(body) | Stmt::Generation(body) => self.apart(|reads| reads.statements(body)),
        }
    }

    fn definition(&mut self, definition: &Macro) {
        for (_, default) in &definition.parameters {
            default.iter().for_each(|default| self.expr(default));
        }
        self.apart(|reads| {
            for name in ["caller", "varargs", "kwargs"] {
                reads.sets(name.into());
            }
            definition.parameters.iter().for_each(|(name, _)| reads.sets(name.clone()));
            reads.statements(&definition.body);
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
