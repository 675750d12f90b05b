//! The op and the test that a row of the table [`unary`](super::unary) generates.

use crate::execution::local_tensor::LocalTensor;
use crate::op::{ForwardContext, LocalTensors, Op, PlanKey};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{Kernel, Scalar};

/// The signature of every row.
pub(super) const SIGNATURE: &str = "..m -> ..m";
const BACKWARD_SIGNATURE: &str = "..m, ..m -> ..m";

/// Backward of an elementwise function by a kernel: dx = f(saved) g.
///
/// `..m, ..m -> ..m` on the saved argument (or result) and the cotangent g; linear in g.
#[derive(Debug)]
pub(super) struct UnaryBackward {
    kernel: &'static Kernel,
    scalars: Vec<Scalar>,
}

impl UnaryBackward {
    /// The cotangent of the argument. `scalars` are those of the function.
    pub(super) fn of(kernel: &'static Kernel, saved: &Tensor, g: &Tensor, scalars: &[f64]) -> Tensor {
        let scalars = scalars.iter().map(|&c| Scalar::Real(c)).collect();
        Tensor::apply_one(UnaryBackward { kernel, scalars }, &[saved, g])
    }
}

impl Op for UnaryBackward {
    fn name(&self) -> &'static str {
        self.kernel.name
    }

    fn signature(&self) -> &str {
        BACKWARD_SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<UnaryBackward>(BACKWARD_SIGNATURE))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(self.kernel, &[x[0], x[1]], &self.scalars)
    }
}

/// Defines the ops of rows. A row has, in this order:
///
/// - docs and aliases of op and method: the first paragraph is the formula, and the text of the op in docs/ops.md
/// - `name => Type`: the name of op and method; a method with another name follows in parentheses, with its own aliases
/// - `fields`: the scalars of the kernel in their order, each an f64
/// - `kernel`: the function, a constant of the kernels' table; the op has its name
/// - `derivative`: the cotangent dx from the cotangent g of the result and from x or the result y. The value that it reads is
///   saved for backward. `{ F(x, g) }` is the kernel F, which also gets the scalars; `{ |g, y| .. }` composes ops; `{ g }` is g
///   itself; `{ none }` is not differentiable
/// - `cases`: ops with the kind of input ([`Input`]) of their test cases, `exact` as in [`Case::exact`]
/// - `worked`: ops with values x => y computed by hand, which a test checks
///
/// Every row has the signature `..m -> ..m`, takes any float dtype and is not linear; layout and dtype of its result do not
/// depend on its fields.
macro_rules! unary_ops {
    ($(
        $(#[doc = $doc:literal])+
        $(#[doc(alias = $alias:literal)])*
        $name:ident $(($($method:tt)+))? => $Op:ident {
            $(fields: { $($(#[doc = $field_doc:literal])+ $field:ident,)+ },)?
            kernel: $kernel:ident,
            derivative: $derivative:tt,
            cases: [$($case:expr => $input:ident $($exact:ident)?),+ $(,)?],
            worked: [$($worked:expr => [$($x:expr => $y:expr),+ $(,)?]),+ $(,)?],
        }
    )+) => {$(
        unary_ops! {
            @struct [
                $(#[doc = $doc])+
                ///
                /// `..m -> ..m`, any float dtype.
                $(#[doc(alias = $alias)])*
                #[derive(Debug)]
            ]
            $Op $({ $($(#[doc = $field_doc])+ pub $field: f64,)+ })?
        }

        impl Op for $Op {
            fn name(&self) -> &'static str {
                kernels::$kernel.name
            }

            fn signature(&self) -> &str {
                SIGNATURE
            }

            fn plan_key(&self) -> Option<PlanKey> {
                Some(PlanKey::of::<$Op>(SIGNATURE))
            }

            fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
                local.launch(&kernels::$kernel, &[x[0]], &[$($(Scalar::Real(self.$field)),+)?])
            }

            unary_ops! { @derivative $derivative [$($($field)+)?] }
        }

        /// The row as an entry of the list of ops.
        pub(super) const fn $name() -> OpModule {
            fn cases() -> Vec<Case> {
                vec![$(Case::new(Rc::new($case), vec![Input::$input(&[5, 3])])$(.$exact())?),+]
            }
            OpModule { name: stringify!($name), cases, source: concat!($("///", $doc, "\n"),+) }
        }

        #[cfg(test)]
        mod $name {
            use super::*;

            #[test]
            fn matches_values_computed_by_hand() {
                $(tests::check_values(|| Rc::new($worked), &[$(($x, $y)),+]);)+
            }
        }
    )+};
    (@struct [$($attributes:tt)+] $Op:ident) => { $($attributes)+ pub struct $Op; };
    (@struct [$($attributes:tt)+] $Op:ident $fields:tt) => { $($attributes)+ pub struct $Op $fields };
    (@derivative { none } []) => {
        fn differentiable(&self) -> &'static [bool] {
            &[false]
        }
    };
    (@derivative { g } $fields:tt) => {
        fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
            cx.cotangents(|_| cx.grad(0))
        }
    };
    (@derivative { $kernel:ident($saved:ident, g) } [$($field:ident)*]) => {
        fn saved_for_backward(&self) -> SavedForBackward {
            unary_ops!(@saves $saved)
        }

        fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
            let scalars = &[$(self.$field),*];
            cx.cotangents(|_| UnaryBackward::of(&kernels::$kernel, unary_ops!(@read $saved cx), &cx.grad(0), scalars))
        }
    };
    (@derivative { |$g:ident, $saved:ident| $dx:expr } []) => {
        fn saved_for_backward(&self) -> SavedForBackward {
            unary_ops!(@saves $saved)
        }

        fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
            cx.cotangents(|_| {
                let ($g, $saved) = (&cx.grad(0), unary_ops!(@read $saved cx));
                $dx
            })
        }
    };
    (@saves x) => { SavedForBackward { inputs: &[0], outputs: &[] } };
    (@saves y) => { SavedForBackward { inputs: &[], outputs: &[0] } };
    (@read x $cx:ident) => { $cx.input(0) };
    (@read y $cx:ident) => { $cx.output(0) };
}

pub(super) use unary_ops;
