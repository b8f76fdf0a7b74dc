// Functions inlined into each other, templates, lambdas and clones, for tests of source lines.
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

template <int N> struct Table {
  std::vector<long> values;
  std::map<std::string, long> names;
  __attribute__((noinline)) long sum(long start) {
    for (auto &value : values) start += value % N;
    for (auto &pair : names) start += pair.second + pair.first.size();
    return start;
  }
  __attribute__((noinline)) void add(const std::string &name, long value) {
    values.push_back(value);
    names[name] = value;
    std::sort(values.begin(), values.end(), [](long a, long b) { return b % N < a % N; });
  }
};

namespace {
inline int leaf(int x) { return x * 3 + 7; }
inline int middle(int x) {
  int sum = 0;
  for (int at = 0; at < x; at++) sum += leaf(sum ^ at);
  return sum;
}
__attribute__((noinline)) int top(int x, const std::function<int(int)> &call) {
  return call(middle(x)) + middle(x + 1);
}
__attribute__((noinline)) std::string text(int count) {
  std::ostringstream out;
  for (int at = 0; at < count; at++) out << top(at, [&](int y) { return y + count; }) << ',';
  return out.str();
}
}  // namespace

int main(int count, char **words) {
  Table<3> a;
  Table<5> b;
  for (int at = 0; at < count * 10; at++) {
    a.add(words[0] + std::to_string(at), at);
    b.add(words[0], at);
  }
  auto kept = std::make_unique<long>(a.sum(1));
  std::cout << text(9) << b.sum(*kept) << '\n';
}
