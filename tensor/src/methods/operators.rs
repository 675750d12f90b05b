//! The operators `+`, `-`, `*`, `/` and negation of values, with values and numbers on both sides.

use crate::tensor::Tensor;

/// Implements the operators of `std::ops` for a type of [`Value`](crate::Value)s, owned or borrowed on either side: `&a + &b`,
/// `&a * 2.0`, `1.0 - &a`, `-&a`. Each calls the method of its name ([`Value::add`](crate::Value::add) and so on), so two values
/// broadcast, and an error names the line of the operator.
///
/// With a number c, `a + c` and `a - c` are [`Value::add_scalar`](crate::Value::add_scalar), `a * c` and `a / c` are
/// [`Value::scale`](crate::Value::scale), which keeps partial sums (`a / c` by the factor 1 / c, rounded once more unless c is a power
/// of two), `c - a` adds c to the negated a, and `c / a` scales the reciprocal of a.
#[doc(alias = "__add__")]
#[doc(alias = "__rmul__")]
#[macro_export]
macro_rules! impl_operators {
    ($Value:ty) => {
        $crate::impl_operators! { @all $Value, Add add, Sub sub, Mul mul, Div div }

        impl ::std::ops::Neg for $Value {
            type Output = $Value;

            #[track_caller]
            fn neg(self) -> $Value {
                <$Value as $crate::Value>::neg(&self)
            }
        }

        impl ::std::ops::Neg for &$Value {
            type Output = $Value;

            #[track_caller]
            fn neg(self) -> $Value {
                <$Value as $crate::Value>::neg(self)
            }
        }
    };
    (@all $Value:ty, $($Operator:ident $method:ident),+) => {$(
        $crate::impl_operators! { @binary $Value, $Operator $method, &$Value, &$Value }
        $crate::impl_operators! { @binary $Value, $Operator $method, &$Value, $Value }
        $crate::impl_operators! { @binary $Value, $Operator $method, $Value, &$Value }
        $crate::impl_operators! { @binary $Value, $Operator $method, $Value, $Value }
        $crate::impl_operators! { @with_number $Value, $Operator $method, $Value }
        $crate::impl_operators! { @with_number $Value, $Operator $method, &$Value }
    )+};
    (@binary $Value:ty, $Operator:ident $method:ident, $Left:ty, $Right:ty) => {
        impl ::std::ops::$Operator<$Right> for $Left {
            type Output = $Value;

            #[track_caller]
            fn $method(self, other: $Right) -> $Value {
                let (left, right): (&$Value, &$Value) = (
                    ::std::borrow::Borrow::borrow(&self),
                    ::std::borrow::Borrow::borrow(&other),
                );
                <$Value as $crate::Value>::$method(left, right)
            }
        }
    };
    (@with_number $Value:ty, $Operator:ident $method:ident, $Side:ty) => {
        impl ::std::ops::$Operator<f64> for $Side {
            type Output = $Value;

            #[track_caller]
            fn $method(self, number: f64) -> $Value {
                let value: &$Value = ::std::borrow::Borrow::borrow(&self);
                $crate::impl_operators! { @$method value number $Value }
            }
        }

        impl ::std::ops::$Operator<$Side> for f64 {
            type Output = $Value;

            #[track_caller]
            fn $method(self, value: $Side) -> $Value {
                let (number, value): (f64, &$Value) = (self, ::std::borrow::Borrow::borrow(&value));
                $crate::impl_operators! { @number $method number value $Value }
            }
        }
    };
    (@number add $number:ident $value:ident $Value:ty) => { <$Value as $crate::Value>::add_scalar($value, $number) };
    (@number sub $number:ident $value:ident $Value:ty) => {
        <$Value as $crate::Value>::add_scalar(&<$Value as $crate::Value>::neg($value), $number)
    };
    (@number mul $number:ident $value:ident $Value:ty) => { <$Value as $crate::Value>::scale($value, $number) };
    (@number div $number:ident $value:ident $Value:ty) => {
        <$Value as $crate::Value>::scale(&<$Value as $crate::Value>::reciprocal($value), $number)
    };
    (@add $value:ident $number:ident $Value:ty) => { <$Value as $crate::Value>::add_scalar($value, $number) };
    (@sub $value:ident $number:ident $Value:ty) => { <$Value as $crate::Value>::add_scalar($value, -$number) };
    (@mul $value:ident $number:ident $Value:ty) => { <$Value as $crate::Value>::scale($value, $number) };
    (@div $value:ident $number:ident $Value:ty) => { <$Value as $crate::Value>::scale($value, 1.0 / $number) };
}

impl_operators!(Tensor);

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Kind, Mesh, Result, World};

    #[test]
    fn operators_match_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let a = Tensor::from_host(rank, &[2], &[1.0f32, 4.0])?;
            let b = Tensor::from_host(rank, &[2], &[2.0f32, -8.0])?;
            let check = |value: Tensor, right: [f32; 2]| -> Result<()> {
                assert_eq!(value.to_host::<f32>()?, right);
                Ok(())
            };
            check(&a + &b, [3.0, -4.0])?;
            check(&a - &b, [-1.0, 12.0])?;
            check(&a * &b, [2.0, -32.0])?;
            check(&a / &b, [0.5, -0.5])?;
            check(&a + 0.5, [1.5, 4.5])?;
            check(&a - 0.5, [0.5, 3.5])?;
            check(&a * 0.5, [0.5, 2.0])?;
            check(&a / 2.0, [0.5, 2.0])?;
            check(0.5 + &a, [1.5, 4.5])?;
            check(0.5 - &a, [-0.5, -3.5])?;
            check(0.5 * &a, [0.5, 2.0])?;
            check(2.0 / &a, [2.0, 0.5])?;
            check(-&a, [-1.0, -4.0])?;
            // Owned on either side: expressions of several operators.
            check(-(1.0 - (&a + &b) * (&a - 1.0) / (2.0 * &b + b.clone())), [-1.0, -0.5])?;
            check(a.clone() * b.clone() - (&a - a.clone()), [2.0, -32.0])?;
            check(2.0 / (a.clone() + a), [1.0, 0.25])
        })
        .unwrap();
    }

    #[test]
    fn partial_sums_stay_partial_where_they_may() {
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let layout = crate::Layout::parse("f32[3] +a", &mesh)?;
            let x = Tensor::full(rank, &layout, 3.0)?;
            for y in [&x * 2.0, 2.0 * &x, &x / 2.0, -&x, &x + &x, &x - &x] {
                assert_eq!(y.layout(), &layout);
            }
            assert_eq!((1.0 - &x).to_host::<f32>()?, [-2.0; 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn errors_name_the_line_of_the_operator() {
        type Case = fn(&Tensor, &Tensor) -> Tensor;
        let cases: [(u32, Case); 7] = [
            (line!(), |a, b| a + b),
            (line!(), |a, b| a - b.clone()),
            (line!(), |a, b| a.clone() * b),
            (line!(), |a, b| a.clone() / b.clone()),
            (line!(), |_, b| -b),
            (line!(), |_, b| b * 2.0),
            (line!(), |_, b| 2.0 - b),
        ];
        for (line, case) in cases {
            let error = World::run(Mesh::single(), |rank| {
                let a = Tensor::from_host(rank, &[2, 2], &[1.0f32; 4])?;
                let b = Tensor::from_host(rank, &[3], &[1i64; 3])?;
                Ok(case(&a, &b).dtype())
            })
            .unwrap_err();
            let site = error.site().expect("the error has a line");
            assert!(site.file().ends_with("operators.rs") && site.line() == line, "{error}");
            assert!([Kind::Shape, Kind::DType].contains(&error.kind()), "{error}");
        }
    }
}
