// A library that has others loaded with it.
int go(void);
int go_on(void) {
    volatile int result = go();
    return result;
}
